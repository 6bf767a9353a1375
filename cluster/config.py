"""Configuration of a whole mesh: one YAML file (``configs/serve/``), read by whoever starts it.

Settings of Ray and Ray Serve that are the same in every mesh, and why, are in ``cluster.environment``.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints, field_validator, model_validator

from cluster.bounds import ADDRESS_PATTERN, NAME_PATTERN, NAMESPACE_PATTERN, PORT_MAX, PORT_MIN
from cluster.rollout import UpdatesConfig
from cluster.scaling.config import ScalingConfig
from models.config import TableBackend
from models.execution_config import ExecutionConfig
from services.embedding.config import EmbeddingConfig
from services.ingress.config import IngressConfig, TierName
from services.preprocess.config import PreprocessConfig
from services.ranking.config import RankingConfig
from services.sequence.config import SequenceConfig
from services.speculative.config import FoundationConfig, SpeculativeConfig
from shared.config import Config, load_config
from shared.userlog import EmbeddedStoreConfig, StoreConfig, UserLogConfig
from shared.userlog.explored import ExploredConfig
from shared.weights import LoadConfig
from shared.weights.peers import PeerConfig
from shared.weights.place import check_place

Transport: TypeAlias = Literal["reference", "value", "by_size"]
"""``by_size``: by value up to ``ray.inline_bytes_max``, by reference above; decided for each request."""

MeshName: TypeAlias = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]

DEFAULT_PATH = Path("configs/serve/local.yaml")
"""The deployment of one machine."""

_STORE_SCHEMES = ("redis://", "rediss://", "unix://")

EDGES: dict[str, Transport] = {
    "preprocess.extract": "by_size",  # features: 31 KB at 500 candidates
    "sequence.encode": "by_size",  # user state: the model decides its size; 30 KB with the small one
    "sequence.append": "value",  # events and three counts
    "sequence.keep_explored": "value",  # 2 KB: exits and ids of 64 candidates at most
    "embedding.lookup": "by_size",  # rows: up to 64 KB a shard at 500 candidates, the largest of all
    "speculative.lookup": "by_size",  # 32 KB at 500 candidates
    "speculative.fill": "by_size",  # 10 KB at 128 pairs; width and pairs are for the model and the file to say
    "foundation.precompute": "by_size",  # takes features, state and rows
    "ranking.rank": "by_size",  # takes all of them; only a by-reference call can take large ones from where they are
}
"""Transport of each call, ``<station>.<method>``; a method that is not named goes by value."""

NICENESS: dict[str, int] = {
    "ingress": 0,
    "preprocess": 0,  # a millisecond, and nothing stands in for features
    "embedding": 5,
    "sequence": 5,
    "speculative": 5,
    "ranking": 5,
    "foundation": 10,  # work after the answer: what the stations of live requests leave
}
"""How much lower than the mesh's own the priority of a station's processes is while they serve (``cluster.priority``).

Where all stations share a few cores, what decides must not queue behind what computes: at four times the load that it
can carry, a mesh whose stations were all equal told a client after 120 ms that it is shed, half of that waiting for a
core. On machines of their own it changes nothing.
"""

NICENESS_STEPS_MAX = 19


class TlsConfig(Config):
    """HTTPS at the front door: HAProxy ends it, or Ray Serve's proxy where that listens.

    Args:
        certificate_file: PEM, the mesh's own certificate first, then those that lead to its authority.
        key_file: PEM, its private key, without a pass phrase.
    """

    certificate_file: Path
    key_file: Path


class HttpConfig(Config):
    """The front door.

    Args:
        host: IPv4 address to listen on. Loopback, or any other with ``tokens_file``: a mesh that others reach does not
            start without.
        tokens_file: Who may call, see ``docs/security.md``. None: ``RANKMESH_TOKENS_FILE``, else everybody on this
            machine.
        tls: HTTPS instead of HTTP.
        port: First of the ``PORTS_PER_MESH`` ports of this mesh, the one that clients use.
        ingress: ``haproxy``: a balancer process in front of the ingress replicas' own servers. ``proxy``: Ray Serve's
            Python proxy. Measured, 500 candidates as JSON, two busy cores: 6 ms against 16 ms a request. HAProxy also
            sends a request to another ingress replica when the first one dies before it answers.
    """

    host: str = Field("127.0.0.1", pattern=r"^\d{1,3}(\.\d{1,3}){3}$")
    port: int = Field(8341, ge=PORT_MIN, le=PORT_MAX)
    ingress: Literal["haproxy", "proxy"] = "haproxy"
    tokens_file: Path | None = None
    tls: TlsConfig | None = None

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        IPv4Address(host)
        return host

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host.startswith("127.")

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        return f"{'http' if self.tls is None else 'https'}://{self.address}:{self.port}"

    @property
    def address(self) -> str:
        """Address at which clients on this machine reach it."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host


class PeerCacheConfig(Config):
    """How the nodes of a mesh load weights.

    Args:
        cache_bytes_max: Chunks that a node keeps on disk.
        load: Streams, limits and repeats of a load.
        peers: Limits of the peer caches.
    """

    cache_bytes_max: int = Field(64 * 2**30, ge=1)
    load: LoadConfig = LoadConfig()
    peers: PeerConfig = PeerConfig()


class WeightsConfig(Config):
    """Where the weights are.

    Args:
        url: Folder or fsspec URL of the weight store; None: ``weights`` in the folder of run-time files.
        version: Version name, or ``latest``: resolved once, at start, so that every station holds the same.
        cache_dir: Folder of each node for versions of a remote store; None: ``cache`` among the run-time files. A store
            in a local folder is read where it is.
        cache: How nodes load from a remote store, and share what they have loaded.
    """

    url: str | None = None
    version: str = Field("latest", min_length=1)
    cache_dir: Path | None = None
    cache: PeerCacheConfig = PeerCacheConfig()

    @field_validator("url")
    @classmethod
    def _without_credentials(cls, url: str | None) -> str | None:
        if url is not None:
            check_place(url)
        return url


class StoreSection(Config):
    """The Redis-protocol store behind user log and speculative cache.

    Args:
        kind: ``embedded``: a Valkey server of this mesh, persistent in its folder. ``redis``: one that is not ours.
        embedded: How the embedded server runs.
        client: How stations reach the store; its ``url`` and ``topology`` count for ``redis`` only.
        log: Limits of the user log; its namespace is the mesh's.
        explored: Limits of what is kept of explored answers, in the same namespace.
    """

    kind: Literal["embedded", "redis"] = "embedded"
    embedded: EmbeddedStoreConfig = EmbeddedStoreConfig()
    client: StoreConfig = StoreConfig()
    log: UserLogConfig = UserLogConfig()
    explored: ExploredConfig = ExploredConfig()

    @model_validator(mode="after")
    def _can_be_reached(self) -> StoreSection:
        if self.kind == "redis" and not self.client.url.startswith(_STORE_SCHEMES):
            scheme = self.client.url.partition("://")[0] if "://" in self.client.url else "nothing"
            raise ValueError(f"client.url must begin with {', '.join(_STORE_SCHEMES)}; it begins with {scheme}")
        return self


class ReplicaConfig(Config):
    """How the replicas of one deployment run.

    Args:
        replicas: How many; with ``autoscaling``: how many at the start.
        autoscaling: How their number follows the load; None: it is fixed.
        max_ongoing_requests: Calls that one replica works on; the router sends more to another replica or queues them.
            Serve's default of 5 would queue where our stations interleave hundreds of short calls on one loop.
        max_queued_requests: Calls that may wait in each caller; the next one is an ``OverloadedError``. Over the
            burst that admission at the ingress can let through: shedding belongs there, before any work.
        num_cpus: Cores that Ray reserves. 0 where all replicas share a machine's few cores on purpose.
        num_gpus: Devices that Ray reserves, fractions allowed.
        threads: Threads of one torch operation; None leaves torch alone, for stations that do not use it.
        health_check_period_s: How often the controller asks. Nothing else tells Serve that an idle replica died, so
            this is most of the time until its successor starts; Serve's default is 10.
        health_check_timeout_s: Silence that counts as a failed check, 3 of which end a replica: a frozen one is
            replaced after three times this. Long enough for a burst of start-ups on few cores.
        graceful_shutdown_timeout_s: Longest wait for calls in flight when a replica is stopped.
        max_surge_percent: Replicas started before old ones stop in a roll-out. 100: a deployment with one replica has
            no gap; Serve's default of 0 stops the only replica first.
    """

    replicas: int = Field(1, ge=0, le=1_000)
    autoscaling: ScalingConfig | None = None
    max_ongoing_requests: int = Field(128, ge=1)
    max_queued_requests: int = Field(512, ge=1)
    num_cpus: float = Field(0.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    threads: int | None = Field(None, ge=1)
    health_check_period_s: float = Field(1.0, gt=0)
    health_check_timeout_s: float = Field(5.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(5.0, ge=0)
    max_surge_percent: int = Field(100, ge=0, le=100)

    @model_validator(mode="after")
    def _within_bounds(self) -> ReplicaConfig:
        if not max(self.replicas_min, 0 if self.autoscaling else 1) <= self.replicas <= self.replicas_max:
            limits = f"{self.replicas_min} to {self.replicas_max}" if self.autoscaling else "at least 1"
            raise ValueError(f"replicas must be {limits}, is {self.replicas}")
        return self

    @property
    def replicas_min(self) -> int:
        """Fewest replicas that there will be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def replicas_max(self) -> int:
        """Most replicas that there will be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


class IngressStation(Config):
    """The ingress: replicas and service.

    Args:
        replicas: Its limit of calls is far over what admission lets in, so that it is admission that sheds, with our
            error body, and status stays readable under load.
        service: Its ``mesh`` and ``num_shards`` come from this file's ``name`` and ``embedding.num_shards``.
    """

    replicas: ReplicaConfig = ReplicaConfig(replicas=2, max_ongoing_requests=1_000, max_queued_requests=1_000)
    service: IngressConfig = IngressConfig()


class PreprocessStation(Config):
    """Preprocess: numpy only, no torch in the process. Two replicas: nothing stands in for features."""

    replicas: ReplicaConfig = ReplicaConfig(replicas=2)
    service: PreprocessConfig = PreprocessConfig()


class EmbeddingStation(Config):
    """The table shards, one deployment each.

    Args:
        num_shards: S.
        replicas: Of each shard.
        backend: How a shard looks up its rows: FBGEMM's operator, or a plain gather.
        map_dir: Folder of each node for rows that do not fit into memory, with backend ``reference``; None: in memory.
    """

    num_shards: int = Field(2, ge=1, le=64)
    backend: TableBackend = "fbgemm"
    map_dir: Path | None = None
    replicas: ReplicaConfig = ReplicaConfig(threads=1)


class SequenceStation(Config):
    """Sequence; ``max_ongoing_requests`` is at most what its worker queues."""

    replicas: ReplicaConfig = ReplicaConfig(max_ongoing_requests=64, threads=1)
    service: SequenceConfig = SequenceConfig()


class SpeculativeStation(Config):
    """The speculative cache's front: numpy only. Width and namespace come from the model and the mesh."""

    replicas: ReplicaConfig = ReplicaConfig()
    service: SpeculativeConfig = SpeculativeConfig()


class FoundationStation(Config):
    """Foundation workers; work after the answer, so a short queue that refuses is right."""

    replicas: ReplicaConfig = ReplicaConfig(max_ongoing_requests=4, max_queued_requests=16, threads=1)
    service: FoundationConfig = FoundationConfig()


class RankingStation(Config):
    """One ranking tier; its ``tier`` is its key in ``ranking``. ``max_ongoing_requests``: what its worker queues."""

    replicas: ReplicaConfig = ReplicaConfig(max_ongoing_requests=32, threads=1)
    service: RankingConfig = RankingConfig()


class NodePlace(Config):
    """Where one more Ray node runs: a network namespace that is there, so that the node can be cut off.

    Args:
        namespace: Its name, as ``ip netns`` lists it.
        address: Of the node in it; every node must reach every other.
    """

    namespace: str = Field(pattern=NAMESPACE_PATTERN)
    address: str = Field(pattern=ADDRESS_PATTERN)


class RayConfig(Config):
    """What the mesh asks of Ray on the machine that starts it.

    Args:
        num_cpus: Logical cores of the node; also the number of worker processes that Ray starts ahead. None: the
            machine's.
        num_nodes: Ray nodes (raylets) on this machine. More than one is for trials of what the death of a node does:
            each has ``num_cpus`` logical cores and an object store of its own; a dead one is replaced.
        address: Of the first node; None: loopback. Any other is open to whoever reaches it and has the mesh's secret.
        places: Of the further nodes; empty: they share the first one's address.
        gcs_storage: Where Ray's control store (GCS) keeps its tables. ``memory``: the mesh ends when GCS dies.
            ``rocksdb``: in files, from which a new GCS goes on; requests do not notice.
        object_store_bytes: Shared memory for references. 256 MiB hold about 1,000 requests of 500 candidates.
        inline_bytes_max: Results up to this size travel inside Ray's own messages, larger ones through shared memory,
            which no other process reads. 64 KiB: no larger tensor passes through the ingress process.
        grpc_bytes_max: Largest call by value; Serve's default of 4 MiB fails with an error of gRPC's own.
        start_timeout_s: Longest time until every station is ready. Usual are 25 s on two idle cores; the limit is for
            a machine that has much else to do.
        stop_timeout_s: Longest orderly stop; then processes are killed.
        silence_max_s: Longest silence of Ray's control store (GCS); then the mesh ends. The raylet gives up after 60.
    """

    num_cpus: int | None = Field(None, ge=1)
    num_nodes: int = Field(1, ge=1, le=16)
    address: str | None = Field(None, pattern=ADDRESS_PATTERN)
    places: tuple[NodePlace, ...] = ()
    gcs_storage: Literal["memory", "rocksdb"] = "memory"
    object_store_bytes: int = Field(256 * 2**20, ge=80 * 2**20)
    inline_bytes_max: int = Field(65_536, ge=1_024, le=2**20)
    grpc_bytes_max: int = Field(64 * 2**20, ge=2**20)
    start_timeout_s: float = Field(300.0, gt=0)
    stop_timeout_s: float = Field(15.0, gt=0)
    silence_max_s: float = Field(90.0, ge=10)

    @model_validator(mode="after")
    def _places_fit(self) -> RayConfig:
        if self.places and len(self.places) != self.num_nodes - 1:
            raise ValueError(f"places must be num_nodes - 1 = {self.num_nodes - 1}, are {len(self.places)}")
        if self.places and self.address is None:
            raise ValueError("places need an address of the first node that they reach, it is on loopback")
        return self


class MeshConfig(Config):
    """One mesh.

    Args:
        name: Names its folder, its keys in a shared store, and its line in status.
        http: The front door.
        weights: Where the weights are.
        store: User log and speculative cache.
        ingress: Front door replicas.
        preprocess: Features.
        embedding: Table shards.
        sequence: User states.
        speculative: Cache of foundation embeddings.
        foundation: Workers that fill it; None: it is only read.
        ranking: Tier name -> deployment; the tiers that ``ingress.service.tiers`` names, no others.
        edges: Transport by ``<station>.<method>``, over the defaults ``EDGES``.
        niceness: Priority by kind of station, over the defaults ``NICENESS``; 0 is the mesh's own.
        idle_class: Whether stations whose niceness is not 0 are in the kernel's idle class (SCHED_IDLE). ``auto``:
            where the mesh's processes are scheduled among themselves only (``cluster.priority``), and there is one Ray
            node on this machine. ``never``: nowhere.
        execution: Kernels and dtype of every station that runs the network; one dtype, so that they fit together.
        updates: How new weights reach the running mesh.
        ray: The runtime.
    """

    name: MeshName = "rankmesh"
    http: HttpConfig = HttpConfig()
    weights: WeightsConfig = WeightsConfig()
    store: StoreSection = StoreSection()
    ingress: IngressStation = IngressStation()
    preprocess: PreprocessStation = PreprocessStation()
    embedding: EmbeddingStation = EmbeddingStation()
    sequence: SequenceStation = SequenceStation()
    speculative: SpeculativeStation = SpeculativeStation()
    foundation: FoundationStation | None = FoundationStation()
    ranking: dict[TierName, RankingStation] = Field(
        default_factory=lambda: {"full": RankingStation(), "light": RankingStation()}
    )
    edges: dict[str, Transport] = Field(default_factory=dict)
    niceness: dict[str, Annotated[int, Field(ge=0, le=NICENESS_STEPS_MAX)]] = Field(default_factory=dict)
    idle_class: Literal["auto", "never"] = "auto"
    execution: ExecutionConfig = ExecutionConfig()
    updates: UpdatesConfig = UpdatesConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _parts_agree(self) -> MeshConfig:
        tiers = {tier.name for tier in self.ingress.service.tiers}
        if tiers != set(self.ranking):
            raise ValueError(f"ingress.service.tiers names {sorted(tiers)}, ranking has {sorted(self.ranking)}")
        if unknown := sorted(set(self.edges) - set(EDGES)):
            raise ValueError(f"edges must be among {', '.join(EDGES)}, has {', '.join(unknown)}")
        if unknown := sorted(set(self.niceness) - set(NICENESS)):
            raise ValueError(f"niceness must be of {', '.join(NICENESS)}, has {', '.join(unknown)}")
        if self.ingress.service.hedge.share_max and self.embedding.replicas.replicas_min < 2:
            raise ValueError("ingress.service.hedge needs embedding.replicas.replicas of at least 2, is 1")
        self._check_scaling()
        if self.ray.places and self.http.ingress != "proxy":
            raise ValueError(
                f"ray.places needs http.ingress proxy, is {self.http.ingress}: HAProxy asks on loopback only"
            )
        self.embedding_service(0)  # refuses a backend that cannot map
        queues = {"sequence": (self.sequence.replicas, self.sequence.service.queue_max)}
        queues |= {f"ranking.{tier}": (part.replicas, part.service.queue_max) for tier, part in self.ranking.items()}
        for where, (replicas, queue_max) in queues.items():
            if replicas.max_ongoing_requests > queue_max:
                raise ValueError(
                    f"{where}.replicas.max_ongoing_requests must be at most its service's queue_max {queue_max}, "
                    f"is {replicas.max_ongoing_requests}"
                )
        return self

    def _check_scaling(self) -> None:
        if self.ingress.replicas.autoscaling is not None:
            raise ValueError("ingress.replicas.autoscaling is not possible: the ports of its replicas are fixed")
        needed = {"preprocess": self.preprocess.replicas, "embedding": self.embedding.replicas}
        needed |= {"sequence": self.sequence.replicas, "speculative": self.speculative.replicas}
        needed |= {f"ranking.{tier}": part.replicas for tier, part in self.ranking.items()}
        for where, replicas in needed.items():
            if replicas.replicas_min < 1:
                raise ValueError(
                    f"{where}.replicas.autoscaling.min_replicas must be at least 1: only foundation workers, for "
                    f"which nobody waits, scale to zero; is {replicas.replicas_min}"
                )

    def transport(self, station: str, method: str) -> Transport:
        """Return how a call travels; ``station`` as in handles, e.g. ``embedding:1``."""
        edge = f"{station.partition(':')[0]}.{method}"
        return self.edges.get(edge, EDGES.get(edge, "value"))

    def niceness_of(self, station: str) -> int:
        """Return how much lower the priority of a station is than the mesh's; ``station`` as in handles."""
        kind = station.partition(":")[0]
        return self.niceness.get(kind, NICENESS[kind])

    def ingress_service(self) -> IngressConfig:
        """Return the ingress's configuration with what this file says elsewhere."""
        return self.ingress.service.model_copy(update={"mesh": self.name, "num_shards": self.embedding.num_shards})

    def user_log(self) -> UserLogConfig:
        """Return the user log's configuration, in this mesh's namespace."""
        return self.store.log.model_copy(update={"namespace": self.name})

    def speculative_service(self, width: int) -> SpeculativeConfig:
        """Return the cache's configuration for a model of this width, in this mesh's namespace."""
        return self.speculative.service.model_copy(update={"namespace": self.name, "width": width})

    def embedding_service(self, shard: int) -> EmbeddingConfig:
        """Return the configuration of one shard."""
        part = self.embedding
        return EmbeddingConfig(shard=shard, num_shards=part.num_shards, backend=part.backend, map_dir=part.map_dir)

    def ranking_service(self, tier: str) -> RankingConfig:
        """Return the configuration of one tier."""
        return self.ranking[tier].service.model_copy(update={"tier": tier})


def load_mesh(
    path: Path = DEFAULT_PATH, name: str | None = None, port: int | None = None, **overrides: object
) -> MeshConfig:
    """Read a deployment file.

    Args:
        path: YAML file.
        name: Wins over the file's ``name``.
        port: Wins over the file's ``http.port``.
        **overrides: Further fields, dotted names written with ``__`` (``weights__version``).

    Raises:
        ConfigError: the file is missing, is not YAML, or breaks a rule.
    """
    chosen: dict[str, object] = {key.replace("__", "."): value for key, value in overrides.items() if value is not None}
    if name is not None:
        chosen["name"] = name
    if port is not None:
        chosen["http.port"] = port
    return load_config(MeshConfig, path, chosen)
