"""A chaos scenario: which mesh, which load, which faults; one YAML file (``configs/chaos/``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from benchmarks.chaos.resources import ResourcePlan
from cluster.config import MeshConfig, MeshName
from cluster.names import station_configs
from shared.config import Config, load_config
from shared.errors import ConfigError

Damage: TypeAlias = Literal["kill", "stop", "slow", "full", "lose_data", "corrupt_weights", "half_weights"]
Surroundings: TypeAlias = Literal["partition", "lossy", "clock", "memory"]
Kind: TypeAlias = Literal[Damage, Surroundings]
Allowed: TypeAlias = Literal["lost", "server_errors"]

TARGETS: dict[Kind, tuple[str, ...]] = {
    "full": ("store",),
    "lose_data": ("store",),
    "corrupt_weights": ("weights",),
    "half_weights": ("weights",),
    "partition": ("node",),
    "lossy": ("node",),
}
"""Kinds that have one victim only; the others take a station or a process."""

NETWORK: tuple[Kind, ...] = ("partition", "lossy")
"""Kinds that need nodes in network namespaces."""

REPLICA: tuple[Kind, ...] = ("clock", "memory")
"""Kinds whose victim is a replica of a station."""


class FaultPlan(Config):
    """One fault.

    Args:
        kind: ``kill``: SIGKILL. ``stop``: SIGSTOP, and SIGCONT after ``hold_s``. ``slow``: stopped ``stopped_share`` of
            each fifth of a second, for ``hold_s``. ``full``: the store refuses writes. ``lose_data``: the store is
            emptied, and filled again after ``hold_s``. ``corrupt_weights``: a version with one flipped byte is
            published and rolled out. ``half_weights``: the same with a file cut in half. ``partition``: a node's cable
            is unplugged for ``hold_s``. ``lossy``: it loses ``lost_share`` of its packets. ``clock``: the wall clock of
            a replica is wrong by ``skew_s``. ``memory``: it may take ``memory_bytes`` more at most, something else uses
            them up, and the system ends it.
        target: A station (``embedding:0``), ``store``, ``controller``, ``gcs``, ``door``, ``node`` or ``weights``.
        hold_s: How long it lasts.
        stopped_share: For ``slow``.
        lost_share: For ``lossy``, in either direction.
        skew_s: For ``clock``.
        memory_bytes: For ``memory``.
        allows: What the fault may cost beyond degraded answers; counted, but no reason to fail.
    """

    kind: Kind
    target: str = Field(min_length=1, max_length=64)
    hold_s: float = Field(3.0, gt=0, le=600)
    stopped_share: float = Field(0.8, gt=0, lt=1)
    lost_share: float = Field(0.05, gt=0, lt=1)
    skew_s: float = Field(3_600.0, ge=-1e9, le=1e9)
    memory_bytes: int = Field(64 * 2**20, ge=2**24, le=2**30)
    allows: tuple[Allowed, ...] = ()

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"{self.kind} {self.target}"

    @model_validator(mode="after")
    def _fits(self) -> FaultPlan:
        allowed = TARGETS.get(self.kind)
        if allowed is not None and self.target not in allowed:
            raise ValueError(f"target of {self.kind} must be {', '.join(allowed)}, is {self.target}")
        if allowed is None and self.target == "weights":
            raise ValueError(f"target of {self.kind} must be a process, is weights")
        if self.kind in REPLICA and self.target in ("store", "controller", "gcs", "door", "node", "weights"):
            raise ValueError(f"target of {self.kind} must be a station, is {self.target}")
        if self.target == "node" and self.kind not in ("kill", *NETWORK):
            raise ValueError(f"a node can be killed, cut off or made lossy, not: {self.kind}")
        return self


class LoadPlan(Config):
    """The open loop.

    Args:
        requests_per_s: Arrivals, evenly spaced, whatever became of earlier ones.
        deadline_ms: Budget of each request.
        candidates: Of each request.
    """

    requests_per_s: float = Field(8.0, gt=0, le=1_000)
    deadline_ms: int = Field(1_000, ge=50, le=10_000)
    candidates: int = Field(60, ge=4, le=2_000)


class Scenario(Config):
    """One experiment.

    Args:
        name: Names the mesh and the files of the report.
        deployment: Deployment file of the mesh; its name, port and weights are the lab's own.
        overrides: Fields of that file that differ, by dotted name.
        network: ``shared``: all nodes have the machine's loopback address. ``namespaces``: each has a network namespace
            and an address of its own; that takes root.
        load: The requests.
        calm_s: Undisturbed load at the start: what is normal is measured there.
        spacing_s: From one fault to the next.
        jitter_s: The seed puts each fault up to this much later.
        recovery_max_s: A mesh that is not healthy this long after the last fault has failed.
        slack: Normal is a latency up to the 99th percentile of the calm times this.
        shuffle: The seed chooses the order; otherwise that of the file.
        swarm_off: Probability with which the seed leaves each fault out (one always stays).
        num_pairs: Double faults that the seed draws from ``faults`` instead of each fault by itself; 0: none.
        pair_gap_s: The second of a pair comes up to this much after the first.
        duration_s: Length of the load: the faults come again and again, each round in an order of its own. None: each
            comes once.
        resources: What is sampled meanwhile, and how fast it may grow; None: nothing.
        faults: What to break.
    """

    name: MeshName
    deployment: Path = Path("configs/serve/local.yaml")
    overrides: dict[str, Any] = Field(default_factory=dict)
    network: Literal["shared", "namespaces"] = "shared"
    load: LoadPlan = LoadPlan()
    calm_s: float = Field(10.0, ge=2, le=600)
    spacing_s: float = Field(15.0, ge=2, le=600)
    jitter_s: float = Field(1.0, ge=0, le=60)
    recovery_max_s: float = Field(60.0, gt=0, le=600)
    slack: float = Field(2.0, ge=1)
    shuffle: bool = True
    swarm_off: float = Field(0.0, ge=0, lt=1)
    num_pairs: int = Field(0, ge=0, le=1_000)
    pair_gap_s: float = Field(2.0, ge=0, le=60)
    duration_s: float | None = Field(None, gt=0, le=86_400)
    resources: ResourcePlan | None = None
    faults: tuple[FaultPlan, ...] = Field(min_length=1, max_length=100)

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if self.jitter_s >= self.spacing_s:
            raise ValueError(f"jitter_s must be under spacing_s {self.spacing_s:g}, is {self.jitter_s:g}")
        if self.num_pairs and len(self.faults) < 2:
            raise ValueError(f"num_pairs needs two faults to draw from, there are {len(self.faults)}")
        apart = [fault.label for fault in self.faults if fault.kind in NETWORK]
        if apart and self.network != "namespaces":
            raise ValueError(f"{apart[0]} needs network namespaces, network is {self.network}")
        if self.duration_s is not None and self.duration_s < self.calm_s + self.spacing_s:
            least_s = self.calm_s + self.spacing_s
            raise ValueError(f"duration_s must be calm_s and spacing_s at least, {least_s:g}, is {self.duration_s:g}")
        return self


def load_scenario(path: Path, overrides: dict[str, Any] | None = None) -> Scenario:
    """Read a scenario.

    Args:
        path: The file.
        overrides: Fields of it that differ, by dotted name.

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks a rule; names field, limit and value.
    """
    return load_config(Scenario, path, overrides)


def mesh_config(scenario: Scenario) -> MeshConfig:
    """Return the deployment of a scenario under the scenario's name.

    Raises:
        ConfigError: the deployment file breaks a rule, or has no such victim as a fault names.
    """
    config = load_config(MeshConfig, scenario.deployment, {**scenario.overrides, "name": f"chaos-{scenario.name}"[:32]})
    check_targets(scenario.faults, config)
    return config


def check_targets(faults: Iterable[FaultPlan], config: MeshConfig) -> None:
    """Check that a mesh has the victims of all faults.

    Raises:
        ConfigError: one has none; names the field and the victims there are.
    """
    there = [*station_configs(config), "controller", "gcs", "door", "weights"]
    there += ["store"] if config.store.kind == "embedded" else []
    there += ["node"] if config.ray.num_nodes > 1 else []
    for number, fault in enumerate(faults):
        if fault.target not in there:
            raise ConfigError(
                f"faults.{number}.target must be one of {', '.join(there)}, is {fault.target}",
                field=f"faults.{number}.target", value=fault.target,
            )  # fmt: skip
