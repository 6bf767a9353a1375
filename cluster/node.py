"""Ray on this machine, and the stations on it: started, watched and stopped by the owner of a mesh.

Imported after the environment is set: Ray reads it at import.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from fsspec.implementations.local import LocalFileSystem
from ray import serve
from ray.experimental import internal_kv

from cluster.app import build
from cluster.config import MeshConfig
from cluster.control import ServeControl
from cluster.desk import FolderDesk
from cluster.failures import start_failure, why_not
from cluster.loopback import LOOPBACK
from cluster.names import APP, station_name
from cluster.peer_cache import live_nodes, start_peers
from cluster.processes import Waiter, wait_until
from cluster.pulse import Pulse
from cluster.raylets import Raylets
from cluster.rollout import Rollouts, RolloutThread
from cluster.stations import Place
from cluster.watch import StationWatch
from shared.clock import SystemClock
from shared.errors import StageUnavailableError
from shared.log import JsonLogger
from shared.weights import WeightStore
from shared.weights.deltas import parse_stamp

_VITAL = {"gcs_server": "GCS", "raylet": "raylet"}
"""Ray's processes of the first node without which nothing works. Of GCS a new one can go on where it keeps files."""

_GCS_TIMEOUT_S = 5.0
_LOGS_KEPT = 2
_STATUS_PERIOD_S = 0.25  # the question costs the controller some milliseconds, and the stations want the cores


class Node:
    """One Ray node, or several, with one Serve application.

    Args:
        config: The mesh.
        runtime: Folder of Ray's files.
        clock: Measures waiting.
    """

    def __init__(self, config: MeshConfig, runtime: Path, clock: Waiter) -> None:
        self._config = config
        self._runtime = runtime
        self._clock = clock
        self._rollouts: RolloutThread | None = None
        self._raylets = Raylets(config.ray)
        self._pulse = Pulse(_ask_gcs)
        self._watch: StationWatch | None = None

    def start(self) -> None:
        """Start Ray's daemons as children of this process: Linux kills them when it dies, however it dies.

        ``ray start`` would leave daemons that only a stop by name ends.
        """
        _drop_old_logs(self._runtime)
        address = self._config.ray.address
        where: dict[str, Any] = {} if address is None else {"_node_ip_address": address}
        ray.init(
            address="local",
            num_cpus=self._config.ray.num_cpus,
            object_store_memory=self._config.ray.object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            namespace=self._config.name,
            _temp_dir=str(self._runtime),
            **where,
        )
        # It reads every process's log for drivers that show them, which this one does not, and keeps the files of dead
        # replicas open, up to 200.
        head: Any = ray._private.worker._global_node
        head.kill_log_monitor()
        self._raylets.start()
        self._pulse.start()

    def open_door(self) -> None:
        """Start Serve's controller and its HTTP door."""
        http = self._config.http
        # What is behind HAProxy is for HAProxy alone, which itself listens where the mesh may be reached.
        options = {"host": http.host if http.ingress == "proxy" else LOOPBACK, "port": http.port}
        if http.tls is not None and http.ingress == "proxy":  # else HAProxy ends TLS, and the replicas speak HTTP to it
            options |= {"ssl_certfile": str(http.tls.certificate_file), "ssl_keyfile": str(http.tls.key_file)}
        # Two listeners of one machine cannot share its port.
        where = serve.config.ProxyLocation.HeadOnly if self._config.ray.num_nodes > 1 else None
        serve.start(proxy_location=where, http_options=options)

    def run(self, place: Place, progress: Callable[[int, int], None]) -> None:
        """Start every station and wait until all are healthy.

        Args:
            place: What the replicas are told.
            progress: Told replicas that run and replicas wanted, again and again; what it raises ends the wait.

        Raises:
            StageUnavailableError: a station did not start; names it and says why.
        """
        store = WeightStore(place.weights_url)
        if not isinstance(store.fs, LocalFileSystem):
            start_peers(self._config.name, live_nodes(), place.weights_url, place.cache_dir, self._config.weights.cache)
        target = serve.RunTarget(build(place), name=APP, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

        def settled() -> bool:
            application = serve.status().applications.get(APP)
            if application is None:
                return False
            states = [each.replica_states for each in application.deployments.values()]
            num_ready = sum(count for each in states for state, count in each.items() if state == "RUNNING")
            progress(num_ready, sum(sum(each.values()) for each in states))
            return application.status in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")

        wait_until(settled, self._clock, self._config.ray.start_timeout_s, _STATUS_PERIOD_S)
        application = serve.status().applications[APP]
        if application.status != "RUNNING":
            messages = {
                name: each.message for name, each in application.deployments.items() if each.status != "HEALTHY"
            }
            what = f"stations did not start ({application.status.value}): {why_not(messages)}"
            raise StageUnavailableError(what, stage="mesh")

    def follow(self, place: Place, folder: Path, logger: JsonLogger) -> None:
        """Bring deltas and new versions to the running stations from now on, and watch them, on threads of their own.

        Args:
            place: What the stations were started with.
            folder: Of the mesh; requests for roll-outs come into it.
            logger: Told of every change and refusal, and why a replica did not start.
        """
        store = WeightStore(place.weights_url)
        control = ServeControl(self._config)
        desk = FolderDesk(store, folder)
        rollouts = Rollouts(desk, place.version, control, self._config.updates, SystemClock(), logger)
        self._rollouts = RolloutThread(rollouts)
        self._rollouts.start()
        self._watch = StationWatch(_start_failures, logger)
        self._watch.start()

    @property
    def served(self) -> str | None:
        """Weights version that most requests are ranked with, None before ``follow``."""
        return None if self._rollouts is None else parse_stamp(self._rollouts.rollouts.order.version)[0]

    def replace_dead(self, logger: JsonLogger) -> None:
        """Put a new Ray node in the place of each that has died, the first one excepted; a new GCS, where it can be."""
        if "gcs_server" in self._dead_daemons() and self._gcs_returns:
            logger.error("gcs_ended")
            restart_gcs(ray._private.worker._global_node, logger)
        self._raylets.replace_dead(logger)

    @property
    def _gcs_returns(self) -> bool:
        return self._config.ray.gcs_storage != "memory"

    def _dead_daemons(self) -> set[str]:
        """Return which kinds of process of the first node have died."""
        head: Any = ray._private.worker._global_node
        return set() if head is None else {kind for kind, _ in head.dead_processes()}

    def ended(self) -> str:
        """Return which part of Ray that the mesh cannot do without is gone, in a few words; empty while all are there.

        ``ray.is_initialized()`` alone stays true when the raylet has died.
        """
        head: Any = ray._private.worker._global_node
        if not ray.is_initialized() or head is None:
            return "this process is not connected to it any more"
        dead = self._dead_daemons() - ({"gcs_server"} if self._gcs_returns else set())
        if gone := [name for kind, name in _VITAL.items() if kind in dead]:
            return f"its {' and '.join(gone)} died"
        if self._pulse.silence_s > self._config.ray.silence_max_s:
            return f"its GCS has not answered for {self._pulse.silence_s:.0f} s"
        return ""

    def stop(self, logger: JsonLogger) -> None:
        """Let the stations finish what they hold, then end Ray's daemons; both within the configured time.

        Args:
            logger: Told when it did not end in order; the owner ends the processes by their id next.
        """
        if self._rollouts is not None:
            self._rollouts.stop()
        self._pulse.stop()
        if self._watch is not None:
            self._watch.stop()
        if self.ended():  # there is nobody left to do it in order; the owner ends what remains by its id
            return

        def in_order() -> None:
            try:
                serve.shutdown()  # type: ignore[no-untyped-call]
                self._raylets.stop()
                ray.shutdown()
            except Exception as error:  # noqa: BLE001 - a half-dead node raises anything; its processes are ended anyway
                logger.warning("ray_stop_failed", error=error)

        # On a thread: with the node half dead either call may wait for ever.
        thread = threading.Thread(target=in_order, daemon=True, name="ray-stop")
        thread.start()
        thread.join(self._config.ray.stop_timeout_s)
        if thread.is_alive():
            logger.warning("ray_stop_late", stop_timeout_s=self._config.ray.stop_timeout_s)


def restart_gcs(head: Any, logger: JsonLogger) -> None:
    """Start a new GCS in the place of one that died; one that does not start is tried again by the next call.

    Args:
        head: Ray's first node.
        logger: Told how it went.
    """
    head.kill_gcs_server(check_alive=False)  # clears what Ray remembers of it; its port and its files stay

    def refused(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            logger.error("gcs_start_failed", error=error)
        return isinstance(error, Exception)

    with ExitStack() as bare:  # Ray raises bare exceptions here
        bare.push(refused)
        head.start_gcs_server()  # by this thread: it ends with the one that started it
        logger.info("gcs_restarted")


def _start_failures() -> dict[str, str]:
    """Return station -> why a replica of it failed to start, of those that lack one."""
    application = serve.status().applications.get(APP)
    found = {}
    for name, each in () if application is None else application.deployments.items():
        lacks = each.status != "HEALTHY" or any(state != "RUNNING" for state in each.replica_states)
        if lacks and (reason := start_failure(each.message)):
            found[station_name(name)] = reason
    return found


def _ask_gcs() -> None:
    client: Any = internal_kv.global_gcs_client
    client.internal_kv_get(b"pulse", None, _GCS_TIMEOUT_S)


def _drop_old_logs(runtime: Path) -> None:
    """Keep the logs of the last starts only: each is some megabytes."""
    folders = sorted(runtime.glob("session_2*"), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_LOGS_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
