"""What a mesh says about itself in its folder, so that other processes find it, ask it and end it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.config import MeshConfig
from cluster.environment import Ports
from cluster.loopback import LOOPBACK, is_listening
from cluster.processes import Process, started_ticks
from shared.errors import ConfigError

Phase: TypeAlias = Literal["starting", "ready", "stopping", "failed"]


class MeshState(BaseModel):
    """One start of a mesh.

    Args:
        name: The mesh.
        mesh_id: Random id that all its processes carry (``cluster.processes``).
        phase: How far it is. ``failed`` stays in the folder; every other one dies with the owner.
        doing: What it is doing, or why it failed, in a few words.
        pid: Process that owns it.
        started_ticks: Start of that process; tells it from a later one with the same id.
        url: Base URL of the API.
        ports: Ports that were promised to it.
        version: Weights version; empty until it is known.
        store_url: Redis-protocol store, without credentials; empty until it is known.
        histories: What of users' past is in the store; empty until it is known, and where the mesh does not load any.
        stop_timeout_s: Longest orderly end that its configuration allows, seconds.
        config_digest: Of its configuration.
        since_s: When it was started, seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    mesh_id: str = Field(min_length=1)
    phase: Phase
    doing: str
    pid: int
    started_ticks: int
    url: str
    ports: tuple[int, ...]
    version: str = ""
    store_url: str = ""
    histories: str = ""
    stop_timeout_s: float
    config_digest: str
    since_s: float

    @property
    def owner(self) -> Process:
        """The process that owns it: number, start and mesh id must all agree."""
        return Process(self.pid, self.started_ticks, self.mesh_id)

    @property
    def runs(self) -> bool:
        """Whether its owner is alive and has not given up."""
        return self.phase != "failed" and self.owner.is_alive()

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader sees the old state or the new one."""
        temporary = path.with_suffix(".part")
        temporary.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        temporary.replace(path)


def read_state(path: Path) -> MeshState | None:
    """Return what the file says, None when there is none or it is not of this version."""
    try:
        return MeshState.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def first_state(config: MeshConfig, mesh_id: str, pid: int, now_s: float) -> MeshState:
    """Return the state of a mesh whose owner, process ``pid``, has just been started."""
    return MeshState(
        name=config.name,
        mesh_id=mesh_id,
        phase="starting",
        doing="looking around",
        pid=pid,
        started_ticks=started_ticks(pid) or 0,
        url=config.http.url,
        ports=Ports(config.http.port).promised(config),
        stop_timeout_s=config.ray.stop_timeout_s,
        config_digest=config.digest(),
        since_s=now_s,
    )


def check_ports(config: MeshConfig, var_dir: Path) -> None:
    """Refuse a mesh one of whose ports somebody listens on.

    Args:
        config: The mesh.
        var_dir: Folder of run-time files, where the meshes of this machine say which ports they have.

    Raises:
        ConfigError: a port is taken; names it, who has it if that is a mesh, and every port that is needed.
    """
    ports = Ports(config.http.port).promised(config)
    own = {(port, LOOPBACK) for port in ports} | {(config.http.port, config.http.address)}
    taken = next((port for port, host in sorted(own) if is_listening(port, host)), None)
    if taken is None:
        return
    states = (read_state(path) for path in var_dir.glob("*/mesh.json"))
    holder = next((state for state in states if state is not None and state.runs and taken in state.ports), None)
    by = "" if holder is None else f" by mesh {holder.name}"
    needed = ", ".join(map(str, ports))
    raise ConfigError(
        f"port {taken} is taken{by}; mesh {config.name} needs {needed}: give another --port (http.port)",
        field="http.port", value=config.http.port,
    )  # fmt: skip
