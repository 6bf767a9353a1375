"""The process that owns one running mesh: ``python -m cluster.owner REQUEST CLAIM``, started by ``cluster.local``.

It starts the store, Ray and the stations, keeps the store alive, and ends everything when it is told to, when the
process it is attached to ends, or when it fails. A process of its own in both modes: the one who asked stays free of
Ray's threads and signal handlers, and Ctrl-C on a terminal reaches Ray only through the orderly end below.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from cluster.claims import NameClaim, PortClaim
from cluster.config import MeshConfig
from cluster.environment import MeshFolders, ray_environment
from cluster.front_door import pem_bundle
from cluster.loading import HistoryLoad, HistoryRequest, LoadRequest
from cluster.loopback import get_status, write_haproxy
from cluster.priority import can_raise, is_scheduled_apart, own_niceness
from cluster.processes import end_members, wait_until
from cluster.state import Phase, check_ports, first_state
from shared.clock import SystemClock
from shared.errors import ConfigError, RankMeshError, StageUnavailableError, StoreUnavailableError
from shared.log import JsonLogger, redact_text
from shared.settings import export
from shared.userlog import EmbeddedStore, StoreConfig
from shared.weights import WeightStore

if TYPE_CHECKING:
    from cluster.node import Node

GRACE_S = 2.0
"""Between asking leftover processes to end and killing them, seconds."""

_ROOT = Path(__file__).parents[1]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_PERIOD_S = 0.5


class OwnRequest(BaseModel):
    """What the owner is asked to run.

    Args:
        config: The mesh.
        var_dir: Folder of run-time files.
        mesh_id: Random id of this start.
        attached: End when standard input closes.
        histories: What the store must hold before a station starts; None: whoever asks fills it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: MeshConfig
    var_dir: Path
    mesh_id: str
    attached: bool
    histories: HistoryRequest | None = None


class StopRequestedError(Exception):
    """The mesh is to end: a signal came, or who it is attached to is gone."""


class Owner:
    """Runs one mesh from start to end.

    Args:
        request: What to run.
    """

    def __init__(self, request: OwnRequest) -> None:
        self._request = request
        self._config = request.config
        self._folders = MeshFolders.of(request.var_dir, request.config.name)
        self._clock = SystemClock()
        self._logger = JsonLogger(clock=self._clock).bind(service="owner", mesh=request.config.name)
        self._stop = threading.Event()
        self._store: EmbeddedStore | None = None
        self._node: Node | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._ports = PortClaim()
        self._state = first_state(self._config, request.mesh_id, os.getpid(), self._clock.now_s())

    def run(self) -> int:
        """Start, serve until told to stop, end. Returns the exit status."""
        self._take_signals()
        failure = ""
        try:
            self._start()
            self._serve()
        except StopRequestedError:
            pass
        except RankMeshError as error:
            failure = error.message
            self._logger.error("mesh_failed", error=error)
        except Exception as error:  # noqa: BLE001 - whatever Ray raised ends here, in the state and the log
            failure = f"{type(error).__name__}: {error}".strip()
            self._logger.error("mesh_failed", error=error)
        self._end(failure)
        return 1 if failure else 0

    # --- start ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folders.make()
        self._guardian = _start_guardian(self._request.mesh_id)
        self._say("starting", "looking around")
        try:
            self._ports.take(self._state.ports)  # also against a mesh that starts now and listens nowhere yet
            check_ports(self._config, self._request.var_dir)
        except ConfigError:
            self._state = self._state.model_copy(update={"ports": ()})  # they are somebody else's, and will stay open
            raise
        weights_url = self._config.weights.url or str(self._request.var_dir.absolute() / "weights")
        weights = WeightStore(weights_url)
        version = self._config.weights.version
        version = weights.latest() if version == "latest" else weights.open(version).version
        self._say("starting", "store", version=version)
        store = self._start_store()
        self._say("starting", "Ray", store_url=redact_text(store.url))
        loading = None
        if (wanted := self._request.histories) is not None:
            loading = HistoryLoad(LoadRequest(wanted=wanted, store=store, log=self._config.user_log()))
        self._start_node(version, weights_url, store, loading)
        self._say("ready", "serving")
        self._logger.info("mesh_ready", version=version, url=self._state.url)
        if not self._config.http.is_loopback and self._config.http.tls is None:
            self._logger.warning("answers_and_tokens_travel_unencrypted", host=self._config.http.host)

    def _start_store(self) -> StoreConfig:
        section = self._config.store
        if section.kind == "redis":
            return section.client
        embedded = section.embedded.model_copy(update={"die_with_parent": True})
        process = EmbeddedStore(self._folders.store, embedded).start()
        # A store that has to be started again must be where the stations look for it.
        self._store = EmbeddedStore(self._folders.store, embedded.model_copy(update={"port": process.port}))
        return section.client.model_copy(update={"url": process.url, "topology": "single"})

    def _start_node(self, version: str, weights_url: str, store: StoreConfig, loading: HistoryLoad | None) -> None:
        self._check_stop()
        variables = ray_environment(self._config, self._folders, _ROOT)
        if self._config.http.ingress == "haproxy":
            http, folder = self._config.http, self._folders.short
            bundle = None if http.tls is None else pem_bundle(http.tls, folder)
            program = write_haproxy(folder, port=http.port, host=http.host, bundle=bundle)
            variables["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(program)
        export(variables)
        from cluster.node import Node
        from cluster.stations import Place

        self._node = Node(self._config, self._folders.runtime, self._clock)
        self._node.start()
        self._take_signals()  # Ray has put its own in place
        self._check_stop()
        self._say("starting", "front door")
        self._node.open_door()
        if loading is not None:
            self._await_histories(loading)

        def progress(num_ready: int, num_wanted: int) -> None:
            self._say("starting", f"stations {num_ready}/{num_wanted}")
            self._check_stop()

        plans, search = (str(self._request.var_dir.absolute() / name) for name in ("plans", "search"))
        niceness = own_niceness() if can_raise() else None
        # Of several nodes on this machine, one that is replaced starts Ray's own processes beside those that serve.
        idle = self._config.idle_class == "auto" and self._config.ray.num_nodes == 1 and is_scheduled_apart()
        place = Place(self._config, version, weights_url, store, plans, search, niceness, idle)
        self._node.run(place, progress)

        tls = self._config.http.tls
        certificate = None if tls is None else tls.certificate_file

        def is_ready() -> bool:
            self._check_stop()
            return get_status(f"{self._state.url}/readyz", 2.0, certificate) == 200

        if not wait_until(is_ready, self._clock, self._config.ray.start_timeout_s):
            raise StageUnavailableError(f"{self._state.url}/readyz does not answer 200", stage="ingress")
        self._node.follow(place, self._folders.root, self._logger)

    def _await_histories(self, loading: HistoryLoad) -> None:
        """Wait for the histories: whoever is ranked without his would get an answer that does not say so."""
        self._say("starting", "histories")

        def pause() -> None:
            self._wait(_WATCH_PERIOD_S / 5)
            self._check_stop()

        loaded = loading.wait(pause)
        where = "in the store already" if loaded.already else "loaded"
        words = f"{loaded.num_events:,} events of {loaded.num_users:,} users {where}"
        self._logger.info("histories_loaded", users=loaded.num_users, events=loaded.num_events, already=loaded.already)
        self._say("starting", "stations", histories=words)

    # --- while it runs --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            self._wait(_WATCH_PERIOD_S)
            self._check_stop()
            if self._node is None:
                continue
            if ended := self._node.ended():
                raise StageUnavailableError(f"Ray has ended: {ended}", stage="ray")
            self._node.replace_dead(self._logger)
            if self._node.served not in (None, self._state.version):
                self._say("ready", "serving", version=str(self._node.served))
            if self._store is not None and self._store.running() is None:
                self._logger.error("store_ended")
                try:
                    self._store.start()
                except StoreUnavailableError as error:  # degraded answers until the next try
                    self._logger.error("store_start_failed", error=error)

    def _wait(self, duration_s: float) -> None:
        """Wait for a stop signal, or for the end of who this is attached to."""
        if not self._request.attached:
            self._stop.wait(duration_s)
            return
        readable, _, _ = select.select([sys.stdin], [], [], duration_s)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            self._stop.set()

    def _check_stop(self) -> None:
        if self._request.attached:
            self._wait(0)
        if self._stop.is_set():
            raise StopRequestedError

    def _take_signals(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    # --- end ------------------------------------------------------------------------------------------------------

    def _end(self, failure: str) -> None:
        self._say("stopping", failure or "ending")
        if self._node is not None:
            self._node.stop(self._logger)
        store = self._store.running() if self._store is not None else None
        guardian = [] if self._guardian is None else [self._guardian.pid]
        # Stations first, then the store, which writes its last events on the way out.
        end_members(self._request.mesh_id, self._clock, GRACE_S, [*guardian, *([] if store is None else [store.pid])])
        if self._store is not None:
            try:
                self._store.stop()
            except StoreUnavailableError as error:
                self._logger.error("store_stop_failed", error=error)
        left = end_members(self._request.mesh_id, self._clock, 0, guardian)
        shutil.rmtree(self._folders.short, ignore_errors=True)
        self._folders.auth_token.unlink(missing_ok=True)
        self._ports.release()
        self._logger.info("mesh_ended", failure=failure, left=[process.pid for process in left])
        if failure:
            self._say("failed", failure)
        else:
            self._folders.state.unlink(missing_ok=True)

    def _say(self, phase: Phase, doing: str, **found: str) -> None:
        state = self._state.model_copy(update={"phase": phase, "doing": doing, **found})
        if state != self._state or not self._folders.state.exists():
            self._state = state
            state.write(self._folders.state)


def _start_guardian(mesh_id: str) -> subprocess.Popen[bytes]:
    """Start the process that ends what is left when this one dies; its input closes with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.guardian", mesh_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=_ROOT,
    )


def main(arguments: list[str]) -> int:
    """Run the mesh that a request describes.

    Args:
        arguments: Descriptors that this process was started with: of the request, and of the claim on the name.
    """
    request_file, claim = map(int, arguments)
    NameClaim.inherited(claim)  # held until this process ends
    with os.fdopen(request_file, "rb") as file:
        file.seek(0)
        request = OwnRequest.model_validate_json(file.read())
    return Owner(request).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
