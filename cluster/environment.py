"""The environment that Ray and Ray Serve read at import, for every mesh; and where a mesh keeps its files and ports.

Ray Serve is tuned by variables alone, so each one that is not at its default is here, with the reason. A variable that
the user has set wins.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.bounds import NAME_PATTERN, NAME_RULE, PORTS_PER_MESH
from cluster.config import MeshConfig
from shared.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket on Linux."""

_RAY_SOCKET_BYTES = 66
"""What Ray adds to its folder: ``/session_<time>_<pid>/sockets/plasma_store``."""

_NUM_FIXED_PORTS = 8


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one mesh, all derived from the one that clients use.

    Args:
        http: Clients.
    """

    http: int

    @property
    def haproxy_metrics(self) -> int:
        """Counters of HAProxy."""
        return self.http + 1

    @property
    def haproxy_stats(self) -> int:
        """Statistics page of HAProxy."""
        return self.http + 2

    @property
    def fallback(self) -> int:
        """Python proxy behind HAProxy, for the moments without an ingress replica."""
        return self.http + 3

    @property
    def replicas(self) -> tuple[int, int]:
        """First and last port of the ingress replicas' own servers."""
        return self.http + _NUM_FIXED_PORTS, self.http + PORTS_PER_MESH - 1

    def promised(self, config: MeshConfig) -> tuple[int, ...]:
        """Return the ports that a mesh opens when it starts, the clients' first."""
        if config.http.ingress == "proxy":
            return (self.http,)
        first, _ = self.replicas
        own = range(first, first + config.ingress.replicas.replicas)
        return (self.http, self.haproxy_metrics, self.haproxy_stats, self.fallback, *own)


@dataclass(frozen=True, slots=True)
class MeshFolders:
    """Where one mesh keeps its files.

    Args:
        root: ``<var>/<name>``: state, log, store.
    """

    root: Path

    @classmethod
    def of(cls, var_dir: Path, name: str) -> MeshFolders:
        """Return the folders of a mesh; none is made. Whatever finds, starts or ends a mesh by its name comes by here.

        Raises:
            ConfigError: a mesh cannot have that name.
        """
        if re.fullmatch(NAME_PATTERN, name) is None:
            raise ConfigError(f"the name of a mesh {NAME_RULE}; is {name[:60]!r}", field="name", value=name[:60])
        return cls((var_dir / name).absolute())

    @property
    def state(self) -> Path:
        """What runs, as ``cluster.state`` writes it."""
        return self.root / "mesh.json"

    @property
    def claim(self) -> Path:
        """Locked by who starts or owns the mesh of this folder (``cluster.claims``)."""
        return self.root / "claim"

    @property
    def log(self) -> Path:
        """Output of the process that owns the mesh."""
        return self.root / "mesh.log"

    @property
    def store(self) -> Path:
        """Folder of the embedded store."""
        return self.root / "store"

    @property
    def runtime(self) -> Path:
        """Folder of Ray: in the mesh's own, or the short one where that is too deep for the path of a Unix socket."""
        inside = self.root / "run"
        fits = len(os.fsencode(inside)) + _RAY_SOCKET_BYTES <= SOCKET_PATH_BYTES_MAX
        return inside if fits else self.short / "ray"

    @property
    def control(self) -> Path:
        """Folder of Ray's control store, where it is to outlive its process; emptied at each start."""
        return self.runtime / "gcs"

    @property
    def short(self) -> Path:
        """Folder of HAProxy, in the system's temporary folder: it adds up to 85 bytes to a socket's path."""
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"rm-{digest}"

    @property
    def auth_token(self) -> Path:
        """The secret that Ray's own ports ask for."""
        return self.root / "token"

    def make(self) -> None:
        """Make the folders, readable by this user alone, and a fresh secret.

        Raises:
            ConfigError: the folder in the system's temporary folder belongs to somebody else.
        """
        # Ray makes its own folder writable for everybody: what is around it must not be.
        for folder in (self.root, self.short):
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise ConfigError(f"{folder} belongs to another user", field="name", value=self.root.name)
            folder.chmod(0o700)
        self.runtime.mkdir(exist_ok=True)
        shutil.rmtree(self.control, ignore_errors=True)  # else Ray takes this for the mesh that was there before
        self.control.mkdir()
        self.auth_token.touch(mode=0o600)
        self.auth_token.write_text(secrets.token_hex(32), encoding="ascii")


def ray_environment(config: MeshConfig, folders: MeshFolders, python_path: Path) -> dict[str, str]:
    """Return the variables that must be set before Ray is imported by the process that starts the mesh.

    Args:
        config: The mesh.
        folders: Its folders.
        python_path: Folder from which the replicas import this package.
    """
    variables = {
        # Nothing of a user's machine leaves it.
        "RAY_USAGE_STATS_ENABLED": "0",
        # All of Ray's ports on loopback: the name speaks of other systems, the effect here is a node at 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # The one kind of port that stays on all interfaces (calls by value) and every other user of this machine must
        # know a secret; it is the mesh's own, so two meshes cannot be mixed up either.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folders.auth_token),
        "RAY_max_direct_call_object_size": str(config.ray.inline_bytes_max),
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(config.ray.grpc_bytes_max),
        # One event loop a replica: without it each call hops between three threads. Measured on the graph of one
        # request: 37 instead of 52 ms of processor time. Long work is on the stations' own threads.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # Ray's default of 15 puts those that serve barely above a successor that loads (cluster.priority).
        "RAY_worker_niceness": "0",
        # What is refused by its headers alone is refused before Serve's own work on it (cluster.doorstep).
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.doorstep.middlewares",
        # The Python proxy reaches the ingress by value: 12 instead of 16 ms a request.
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        # A replica that fails its checks is replaced at once; Serve would wait for its calls, which hang with it.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # A dead proxy is 23 to 30 s without HTTP at the default of 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Every replica writes its counters, and the controller looks at all of them, ten times a second by default: a
        # tenth of a core that requests have more use for. Nobody reads them that often.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
        "RAY_SERVE_ROUTER_QUEUE_LEN_GAUGE_THROTTLE_S": "2",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
        # No lines of Serve on the terminal, and its request log written in batches.
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "PYTHONPATH": str(python_path),
    }
    if config.ray.gcs_storage == "rocksdb":
        variables |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folders.control)}
    if config.http.ingress == "haproxy":
        variables |= _haproxy(config, folders)
    return variables


def _haproxy(config: MeshConfig, folders: MeshFolders) -> dict[str, str]:
    ports = Ports(config.http.port)
    first, last = ports.replicas
    folder = folders.short
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Its defaults are one folder and one set of ports a machine; two meshes need two.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(last),
        # One thread moves 4,000 requests a second here; four would take turns on the stations' cores.
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # Also when a replica dies with the request in hand: ranking reads only, and events have ids that are kept once.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "2",
        # What may be sent again must fit the buffer; 2,000 candidates are 30 KB of JSON.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "131072",
        # A replica that does not answer its checks is out after 2 of them; the defaults are 5 s apart.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        # Old workers after a reload, and with them the ports of replaced replicas, are kept for 2 min by default.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "20",
        "RAY_SERVE_PORT_QUARANTINE_S": "25",
        # Serve waits so long with the end of an ingress replica, for balancers that it does not know of.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
