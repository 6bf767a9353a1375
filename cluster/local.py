"""Starts, finds and ends meshes on this machine.

::

    with Mesh.start(load_mesh(), on_progress=print) as mesh:   # attached: ends with this process
        ... mesh.url ...
    Mesh.start(config, detached=True)                          # stays
    Mesh.find("rankmesh").stop()
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.claims import NameClaim
from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.front_door import secured
from cluster.loading import HistoryRequest
from cluster.loopback import is_listening
from cluster.owner import GRACE_S, OwnRequest
from cluster.processes import MESH_VARIABLE, Process, end_members, members, wait_until
from cluster.state import MeshState, check_ports, first_state, read_state
from shared.clock import SystemClock
from shared.errors import ConfigError, RankMeshError, StageUnavailableError
from shared.settings import child_environment, load_settings

STOP_MARGIN_S = 15.0
"""What an owner may need beyond ``ray.stop_timeout_s`` to end: the store's last write, leftover processes."""

_LOG_TAIL_BYTES = 8_192
_LOG_LINES = 4
_LOG_LINE_CHARS = 200
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")
_LOG_KEPT_BYTES = 2**20

Progress = Callable[[str], None]


class Mesh:
    """One running mesh of this machine.

    Args:
        folders: Its files.
        state: What its owner last said.
        child: Its owner, when this process started it attached.
    """

    def __init__(self, folders: MeshFolders, state: MeshState, child: subprocess.Popen[bytes] | None = None) -> None:
        self.folders = folders
        self.state = state
        self._child = child
        self._clock = SystemClock()

    @classmethod
    def start(
        cls,
        config: MeshConfig,
        *,
        detached: bool = False,
        var_dir: Path | None = None,
        on_progress: Progress | None = None,
        histories: HistoryRequest | None = None,
    ) -> Self:
        """Start a mesh and wait until it answers rank requests.

        Args:
            config: The mesh.
            detached: Leave it running when this process ends; otherwise it ends with this process, however that ends.
            var_dir: Folder of run-time files; None: from the settings.
            on_progress: Told in a few words what is being done, each time that changes.
            histories: What its store must hold before it serves; None: the caller fills it.

        Raises:
            ConfigError: a mesh of this name runs already, a port is taken, or others could reach it without a token.
            StageUnavailableError: it did not start; says why. Nothing of it is left.
        """
        var_dir = (var_dir or load_settings().var_dir).absolute()
        config = cls.prepare(config, var_dir)
        folders = MeshFolders.of(var_dir, config.name)
        claim = _claimed(folders)
        try:
            if (before := read_state(folders.state)) is not None:
                _refuse_running(before)
            folders.state.unlink(missing_ok=True)
            request = OwnRequest(
                config=config,
                var_dir=var_dir,
                mesh_id=secrets.token_hex(8),
                attached=not detached,
                histories=histories,
            )
            log_start = _cut_log(folders.log)
            child = _spawn(request, folders, claim)
        finally:
            claim.release()  # the owner has it from here on, for as long as it lives
        mesh = cls(folders, first_state(config, request.mesh_id, child.pid, SystemClock().now_s()), child)
        try:
            mesh._await_ready(config.ray.start_timeout_s + config.ray.stop_timeout_s, on_progress, log_start)
        except BaseException as failure:
            mesh._stop_after(failure)
            raise
        if detached:
            child.returncode = 0  # not ours to wait for any more; else its object complains when it is dropped
            mesh._child = None
        return mesh

    @classmethod
    def prepare(cls, config: MeshConfig, var_dir: Path | None = None) -> MeshConfig:
        """Refuse now what ``start`` would refuse, before anybody spends minutes on weights for it.

        What a killed mesh of that name left behind is ended on the way.

        Returns:
            The configuration with the files of its front door resolved.

        Raises:
            ConfigError: a mesh of this name runs already, a port is taken, others could reach it without a token, or
                this machine lacks the native kernels that it asks for.
        """
        settings = load_settings()
        config = secured(_with_absolute_weights(config), settings)
        var_dir = (var_dir or settings.var_dir).absolute()
        folders = MeshFolders.of(var_dir, config.name)
        running = read_state(folders.state)
        if running is not None:
            _refuse_running(running)
            _sweep(running, folders)  # what a killed owner may have left
        check_ports(config, var_dir)
        if config.execution.backend == "native":
            from models.execution import choose_execution  # imports torch

            choose_execution("native", config.execution.precision)
        return config

    @classmethod
    def find(cls, name: str, var_dir: Path | None = None) -> Self | None:
        """Return the running mesh of a name, None when there is none."""
        folders = MeshFolders.of((var_dir or load_settings().var_dir).absolute(), name)
        state = read_state(folders.state)
        return cls(folders, state) if state is not None and state.runs else None

    @classmethod
    def end(cls, name: str, var_dir: Path | None = None) -> bool:
        """End the mesh of a name and whatever a killed one left behind.

        Returns:
            Whether there was anything to end.

        Raises:
            StageUnavailableError: a process or a port remains; names it.
        """
        folders = MeshFolders.of((var_dir or load_settings().var_dir).absolute(), name)
        state = read_state(folders.state)
        if state is None:
            return False
        had_any = state.runs or bool(members(state.mesh_id))
        cls(folders, state).stop()
        return had_any

    def __enter__(self) -> Self:
        """Return the mesh."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the mesh."""
        self.stop()

    @property
    def name(self) -> str:
        """Name of the mesh."""
        return self.state.name

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return self.state.url

    @property
    def version(self) -> str:
        """Weights version that it serves."""
        return self.state.version

    @property
    def store_url(self) -> str:
        """URL of its Redis-protocol store, without credentials."""
        return self.state.store_url

    @property
    def histories(self) -> str:
        """What of users' past it has loaded, in words; empty where it was not asked to."""
        return self.state.histories

    @property
    def is_running(self) -> bool:
        """Whether its owner is alive."""
        return self.state.owner.is_alive()

    @property
    def was_ended(self) -> bool:
        """Whether its owner, started attached by this process, has ended because it was told to."""
        return self._child is not None and self._child.poll() == 0

    def processes(self) -> list[Process]:
        """Return every process of the mesh."""
        return members(self.state.mesh_id)

    def wait(self, timeout_s: float) -> bool:
        """Block until the mesh has ended or time is up; returns whether it has ended."""
        return wait_until(lambda: not self._owner_runs(), self._clock, timeout_s)

    def stop(self) -> None:
        """End the mesh: in order if its owner still can, else by force; then check that nothing remains.

        Raises:
            StageUnavailableError: a process or a port remains; names it.
        """
        self.state.owner.send(signal.SIGTERM)
        if not self.wait(self.state.stop_timeout_s + STOP_MARGIN_S):
            self.state.owner.send(signal.SIGKILL)
            self.wait(GRACE_S)
        if self._child is not None:
            self._child.wait()
            if self._child.stdin is not None:
                self._child.stdin.close()
        left = _sweep(self.state, self.folders)
        ports = [] if left else self._ports_left()
        if left or ports:
            what = f"process {left[0].pid}" if left else f"port {ports[0]}"
            raise StageUnavailableError(f"mesh {self.name} has ended, but {what} remains", stage="mesh")
        last = read_state(self.folders.state)
        if last is not None and last.mesh_id == self.state.mesh_id and last.phase != "failed":
            self.folders.state.unlink(missing_ok=True)  # its owner was killed and could not

    def _stop_after(self, failure: BaseException) -> None:
        """End the mesh after a failed start; what then remains does not hide why it failed."""
        try:
            self.stop()
        except StageUnavailableError as left:
            if not isinstance(failure, RankMeshError):
                raise
            raise StageUnavailableError(f"{failure.message}; {left.message}", stage="mesh") from failure

    def _await_ready(self, timeout_s: float, on_progress: Progress | None, log_start: int) -> None:
        told = ""

        def is_settled() -> bool:
            nonlocal told
            self.state = self._said()
            if on_progress is not None and self.state.doing != told:
                told = self.state.doing
                on_progress(told)
            return self.state.phase in ("ready", "failed") or not self._owner_runs()

        in_time = wait_until(is_settled, self._clock, timeout_s)
        self.state = self._said()
        if self.state.phase == "ready":
            return
        if not in_time:
            raise StageUnavailableError(f"mesh {self.name} was not ready within {timeout_s:.0f} s", stage="mesh")
        if self.was_ended:
            raise StageUnavailableError(
                f"mesh {self.name} did not start: it was ended by `rankmesh down`, or a signal, while it started",
                stage="mesh",
            )
        if self.state.phase == "failed":
            reason = f"{self.state.doing}; {self.folders.log} has more"
        else:
            reason = f"its process ended; {self.folders.log} ends: {log_end(self.folders.log, log_start)}"
        raise StageUnavailableError(f"mesh {self.name} did not start: {reason}", stage="mesh")

    def _said(self) -> MeshState:
        """Return what its owner last said; another start of the same name says nothing about this one."""
        state = read_state(self.folders.state)
        return self.state if state is None or state.mesh_id != self.state.mesh_id else state

    def _owner_runs(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self.state.owner.is_alive()

    def _ports_left(self) -> list[int]:
        def left() -> list[int]:
            return [port for port in self.state.ports if is_listening(port)]

        # A port may be another program's by now; but then it was not closed first, and one look would not tell.
        wait_until(lambda: not left(), self._clock, GRACE_S)
        return left()


def _refuse_running(state: MeshState) -> None:
    if state.runs:
        raise ConfigError(
            f"mesh {state.name} runs already, at {state.url} (process {state.pid}); end it with "
            f"`rankmesh down --name {state.name}`, or give another --name and --port",
            field="name", value=state.name,
        )  # fmt: skip


def _claimed(folders: MeshFolders) -> NameClaim:
    claim = NameClaim.take(folders.claim)
    if claim is None:
        raise ConfigError(
            f"mesh {folders.root.name} is just being started or ended by another process; try again, or give another "
            "--name and --port",
            field="name", value=folders.root.name,
        )  # fmt: skip
    return claim


def _spawn(request: OwnRequest, folders: MeshFolders, claim: NameClaim) -> subprocess.Popen[bytes]:
    """Start the owner in a process group of its own, its output in the mesh's log, with the claim on its name."""
    # A file without a name: the store's URL in it may hold a password, and no other start can take it for its own.
    with folders.log.open("ab") as log, tempfile.TemporaryFile(dir=folders.root) as asked:
        asked.write(request.model_dump_json().encode())
        asked.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.owner", str(asked.fileno()), str(claim.fileno())],
            pass_fds=(asked.fileno(), claim.fileno()),
            stdin=subprocess.PIPE if request.attached else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
            env=child_environment(**{MESH_VARIABLE: request.mesh_id}),
        )


def _with_absolute_weights(config: MeshConfig) -> MeshConfig:
    """Return the configuration with a weights folder that does not depend on where a process runs."""
    url = config.weights.url
    if url is None or "://" in url:
        return config
    weights = config.weights.model_copy(update={"url": str(Path(url).absolute())})
    return config.model_copy(update={"weights": weights})


def _sweep(state: MeshState, folders: MeshFolders) -> list[Process]:
    """End every process of an earlier start; returns what would not end."""
    left = end_members(state.mesh_id, SystemClock(), GRACE_S)
    claim = NameClaim.take(folders.claim)
    if claim is not None:  # else the name is another start's by now, and the folder too
        shutil.rmtree(folders.short, ignore_errors=True)
        claim.release()
    return left


def _cut_log(path: Path) -> int:
    """Keep the end of a long log, every start appends to it; returns where the next start's lines will begin."""
    if not path.exists():
        return 0
    if path.stat().st_size > 2 * _LOG_KEPT_BYTES:
        path.write_bytes(path.read_bytes()[-_LOG_KEPT_BYTES:])
    return path.stat().st_size


def log_end(path: Path, start: int = 0) -> str:
    """Return the last few lines of a log in one, without colours.

    Args:
        path: The log.
        start: Byte from which on it is looked at.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "(it cannot be read)"
    lines = [line for each in text.splitlines() if (line := _ESCAPES.sub("", each).strip())]
    return " | ".join(line[:_LOG_LINE_CHARS] for line in lines[-_LOG_LINES:]) or "(nothing was written)"
