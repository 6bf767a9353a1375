"""What Ray Serve runs: one thin class a station, around the plain service of ``services/``.

Each class is built inside its replica's process and imports its service there, so that a replica loads what it needs
and no more (torch takes 2 s and 200 MB; preprocess, speculative and ingress do without). A station with a model is
built only when its part of the golden request gives the golden answers: Serve sends it no call before that.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import MeshConfig
from cluster.control import published_order
from cluster.names import station_configs, station_name
from cluster.peer_cache import open_on_node
from cluster.priority import quiet_threads, quietly, serve_at
from cluster.replica_log import replica_log
from cluster.scaling.device import NvmlSampler, SmActivity
from cluster.scaling.load import Activity, LoadReporter
from services.ingress.serving import ServingOrder
from shared.clock import SystemClock
from shared.errors import ConfigError
from shared.log import JsonLogger, Level
from shared.settings import load_settings
from shared.userlog import StoreConfig
from shared.weights import WeightReader, WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import parse_stamp
from shared.weights.held import HeldVersions, Series

if TYPE_CHECKING:
    from fastapi import FastAPI
    from numpy.typing import NDArray

    from models.execution_config import Execution
    from models.stations import CandidateRanker
    from models.updates.series import LiveSeries
    from shared.hashing import EntityId
    from shared.schema.api import Event
    from shared.schema.embeddings import EmbeddingRows
    from shared.schema.explored import ExploredAnswer
    from shared.schema.features import FeatureBatch, PreprocessTask
    from shared.schema.ranking import RankedList, RankTask
    from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
    from shared.schema.user import EncodeTask, UserState


PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class Place:
    """What a replica is told about the mesh it belongs to; travels by pickle.

    Args:
        config: The whole configuration.
        version: Weights version, resolved once for all stations.
        weights_url: Weight store.
        store: How to reach the Redis-protocol store.
        plans: Folder of precision plans, which need not be there.
        search: Folder of what kernel searches found, which need not be there.
        niceness: Of the mesh, when replicas' processes start at a lower priority (``cluster.priority``); None: they
            start at the mesh's.
        idle_class: Whether those of lower priority are in the kernel's idle class.
    """

    config: MeshConfig
    version: str
    weights_url: str
    store: StoreConfig
    plans: str
    search: str
    niceness: int | None = None
    idle_class: bool = False

    def weights(self, version: str | None = None) -> WeightReader:
        """Open a weights version, None: the one that the mesh started with; of a remote store by way of the peers."""
        weights = self.config.weights
        return open_on_node(
            WeightStore(self.weights_url),
            version or self.version,
            self.config.name,
            self.cache_dir / "versions",
            weights.cache,
        )

    @property
    def cache_dir(self) -> Path:
        """Folder of this node for what comes from a remote store."""
        return self.config.weights.cache_dir or Path(self.plans).parent / "cache"

    def deltas(self, version: str) -> DeltaLog:
        """Return the log of a version's deltas."""
        return DeltaLog(WeightStore(self.weights_url), version)

    def order(self) -> ServingOrder:
        """Return what the mesh ranks with now, and which states a replica that starts must hold."""
        return published_order(self.config.name) or ServingOrder.first(self.version)

    def execution(self, version: str | None = None) -> Execution:
        """Choose the kernels and the dtype of this replica, for the machine that it is on.

        Raises:
            ConfigError: the machine cannot do what the configuration asks.
        """
        from models.config import RankerConfig
        from models.execution import choose_execution  # imports torch
        from models.tuning import tuned_execution

        backend, precision = self.config.execution.backend, self.config.execution.precision
        if backend == "auto":
            model = RankerConfig.model_validate(self.weights(version).json("model"))
            if (tuned := tuned_execution(model, precision, Path(self.search))) is not None:
                return tuned
        return choose_execution(backend, precision)


ORDERS_MAX = 20
"""Orders that a replica obeys before it serves; deltas that come faster it catches up with later."""


def take_up(read: Callable[[], ServingOrder], obey: Callable[[ServingOrder], None]) -> None:
    """Obey the mesh's order, and the next where one came meanwhile: reading weights takes up to minutes.

    Args:
        read: Returns the order.
        obey: Does what it says of versions; blocks.
    """
    known: tuple[object, ...] = ()
    for _ in range(ORDERS_MAX):
        order = read()
        if (asked := (order.version, order.canary, order.held)) == known:
            return
        obey(order)
        known = asked


class Station:
    """Base of the stations.

    Args:
        place: The mesh.
        threads: Threads of one torch operation; None for a station without torch.
    """

    service: Any
    versions: HeldVersions[Any]

    def __init__(self, place: Place, threads: int | None) -> None:
        self.place = place
        self._is_starting = True
        self.clock = SystemClock()
        self.replica = replica_name()
        self._activity = gpu_activity(place.config)
        self._reporter: LoadReporter | None = None
        settings = load_settings()
        logger = JsonLogger(cast(Level, settings.log_level), replica_log(), self.clock)
        self.logger = logger.bind(mesh=place.config.name)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    def follow(self, open_series: Callable[[str], Series[PartT]]) -> HeldVersions[PartT]:
        """Take up what requests may ask for, from weights that have given the golden answers, and follow what comes.

        Args:
            open_series: Reads a version and checks it.

        Raises:
            WeightsError: the weights do not load, or an answer differs.
        """
        # Deltas at normal priority: what applies them has the interpreter's lock in turn with the event loop, and one
        # that is low and has it would keep the loop waiting for as long as the cores are busy with other processes.
        versions = HeldVersions(open_series, quiet_threads(1), ThreadPoolExecutor(1, thread_name_prefix="deltas"))
        take_up(self.place.order, lambda order: quietly(versions.start, order.held, order.version))
        self.versions = versions
        return versions

    async def hold(self, stamps: list[str], wait_s: float) -> dict[str, Any]:
        """Take up weights, and let go of all others once these are here; see ``HeldVersions.hold``."""
        return {"replica": self.replica, **(await self.versions.hold(stamps, wait_s)).body()}

    async def check_health(self) -> None:
        """Answer Serve's health check; the first one ends the start."""
        if self._is_starting:
            self._is_starting = False
            # What a start made stays: a full collection walks only what came since, and holds the event loop up less.
            gc.collect()
            gc.freeze()
            try:
                steps = self.place.config.niceness_of(own_station())
                serve_at(self.place.niceness, steps, idle=self.place.idle_class and steps > 0)
            except PermissionError as error:  # this node is not like the one that started the mesh
                self.logger.warning("slow_replica", reason=f"it stays at the low priority of its start: {error}")
        await self.service.check_health()

    async def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        status: dict[str, Any] = self.service.status()
        return status

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how busy this replica was since the last call; Serve asks where a deployment scales."""
        if self._reporter is None:
            self._reporter = LoadReporter(self.service, self.clock, self._activity)
        return self._reporter.report()

    async def __del__(self) -> None:
        """Let the service finish: Serve awaits this when it stops a replica in order."""
        service: Any = getattr(self, "service", None)  # none when the constructor failed
        if hasattr(service, "aclose"):
            await service.aclose()


class Preprocess(Station):
    """``preprocess``."""

    def __init__(self, place: Place) -> None:
        from services.preprocess.series import extractor_series
        from services.preprocess.service import PreprocessService

        super().__init__(place, None)
        live = place.config.updates.live
        versions = self.follow(lambda base: extractor_series(place.weights(base), place.deltas(base), live))
        self.service = PreprocessService(
            place.config.preprocess.service, versions, self.clock, self.replica, self.logger
        )

    async def extract(self, task: PreprocessTask) -> FeatureBatch:
        """See ``PreprocessService.extract``."""
        features: FeatureBatch = await self.service.extract(task)
        return features


class Embedding(Station):
    """``embedding:<shard>``."""

    def __init__(self, place: Place, shard: int) -> None:
        quietly(importlib.import_module, "models.updates.stations")
        from models.updates.stations import shard_series
        from services.embedding.service import EmbeddingService

        super().__init__(place, place.config.embedding.replicas.threads)
        config, live = place.config.embedding_service(shard), place.config.updates.live
        versions = self.follow(
            lambda base: shard_series(
                place.weights(base),
                place.deltas(base),
                config.shard,
                config.num_shards,
                config.backend,
                live,
                config.map_dir,
            )
        )
        self.service = EmbeddingService(config, versions, self.clock, self.replica, self.logger)

    async def lookup(self, features: FeatureBatch, remaining_ms: float) -> EmbeddingRows:
        """See ``EmbeddingService.lookup``."""
        rows: EmbeddingRows = await self.service.lookup(features, remaining_ms)
        return rows


class Sequence(Station):
    """``sequence``."""

    def __init__(self, place: Place) -> None:
        quietly(importlib.import_module, "models.updates.stations")
        from models.updates.stations import encoder_series
        from services.sequence.service import SequenceService
        from shared.userlog import RedisUserLog, connect
        from shared.userlog.explored import RedisExploredLog

        super().__init__(place, place.config.sequence.replicas.threads)
        live = place.config.updates.live
        versions = self.follow(
            lambda base: encoder_series(place.weights(base), place.deltas(base), place.execution(base), live)
        )
        client, config = connect(place.store), place.config.user_log()
        log = RedisUserLog(client, config)
        explored = RedisExploredLog(client, config.namespace, place.config.store.explored)
        self.service = SequenceService(
            place.config.sequence.service, versions, log, self.clock, self.replica, self.logger, explored=explored
        )

    async def encode(self, task: EncodeTask) -> UserState:
        """See ``SequenceService.encode``."""
        state: UserState = await self.service.encode(task)
        return state

    async def append(self, events: list[Event]) -> dict[str, int]:
        """See ``SequenceService.append``."""
        result: dict[str, int] = await self.service.append(events)
        return result

    async def keep_explored(self, answer: ExploredAnswer) -> bool:
        """See ``SequenceService.keep_explored``."""
        kept: bool = await self.service.keep_explored(answer)
        return kept

    async def forget(self, user: EntityId) -> bool:
        """See ``SequenceService.forget``."""
        found: bool = await self.service.forget(user)
        return found


class Speculative(Station):
    """``speculative``."""

    def __init__(self, place: Place) -> None:
        from services.speculative.series import NamedStates
        from services.speculative.service import SpeculativeService
        from services.speculative.store import EmbeddingStore
        from shared.userlog import connect

        super().__init__(place, None)
        # The one client class has more than this store uses; Redis Cluster's has the same methods.
        client: Any = connect(place.store)

        def open_series(base: str) -> NamedStates[EmbeddingStore]:
            config = place.config.speculative_service(int(place.weights(base).json("model")["speculative_width"]))
            return NamedStates(base, lambda stamp: EmbeddingStore(client, config, stamp, self.clock))

        versions = self.follow(open_series)
        config = place.config.speculative.service
        self.service = SpeculativeService(config, versions, self.clock, self.replica, self.logger)

    async def lookup(self, task: SpeculativeTask, features: FeatureBatch) -> SpeculativeEmbeddings:
        """See ``SpeculativeService.lookup``."""
        found: SpeculativeEmbeddings = await self.service.lookup(task, features)
        return found

    async def fill(self, task: SpeculativeTask, batch: PrecomputedBatch) -> int:
        """See ``SpeculativeService.fill``."""
        stored: int = await self.service.fill(task, batch)
        return stored

    async def forget(self, user: EntityId) -> bool:
        """See ``SpeculativeService.forget``."""
        found: bool = await self.service.forget(user)
        return found


class Foundation(Station):
    """``foundation``."""

    def __init__(self, place: Place) -> None:
        quietly(importlib.import_module, "models.updates.stations")
        from services.speculative.foundation import FoundationService

        part = place.config.foundation
        assert part is not None  # deployed only where there is one
        super().__init__(place, part.replicas.threads)
        versions = self.follow(lambda base: open_ranker(place, base, None, self.logger))
        # Work after the answer, for answers to come: it gets what the stations that somebody waits for leave.
        behind = quiet_threads(1)
        self.service = FoundationService(part.service, versions, self.clock, self.replica, self.logger, behind)

    async def precompute(
        self,
        task: SpeculativeTask,
        positions: NDArray[Any],
        features: FeatureBatch,
        state: UserState | None,
        *rows: EmbeddingRows | None,
    ) -> PrecomputedBatch:
        """See ``FoundationService.precompute``."""
        batch: PrecomputedBatch = await self.service.precompute(task, positions, features, state, *rows)
        return batch


class Ranking(Station):
    """``ranking:<tier>``."""

    def __init__(self, place: Place, tier: str) -> None:
        quietly(importlib.import_module, "models.updates.stations")
        from services.ranking.service import RankingService

        super().__init__(place, place.config.ranking[tier].replicas.threads)
        config = place.config.ranking_service(tier)
        if tier not in (tiers := place.weights().json("model")["tiers"]):
            raise ConfigError(f"ranking must be among {sorted(tiers)}, has {tier!r}", field="ranking", value=tier)
        plans = Path(config.plans or place.plans)
        versions = self.follow(lambda base: open_ranker(place, base, plans, self.logger))
        self.service = RankingService(config, versions, self.clock, self.replica, self.logger)

    async def rank(
        self,
        task: RankTask,
        features: FeatureBatch,
        state: UserState | None,
        spec: SpeculativeEmbeddings | None,
        *rows: EmbeddingRows | None,
    ) -> RankedList:
        """See ``RankingService.rank``."""
        ranked: RankedList = await self.service.rank(task, features, state, spec, *rows)
        return ranked


class Ingress(Station):
    """``ingress``: the HTTP server of this replica is made by Serve from ``__serve_build_asgi_app__``.

    Args:
        place: The mesh.
        handles: Station name -> its Serve handle.
    """

    def __init__(self, place: Place, handles: dict[str, DeploymentHandle[Any]]) -> None:
        from cluster.connect import connect_stations
        from cluster.status import MeshDirectory, ServeInformant
        from services.ingress.gains import gain_series
        from services.ingress.model_info import ModelInfo
        from services.ingress.routing import router_for
        from services.ingress.service import IngressService
        from services.ingress.serving import FrontModel

        super().__init__(place, None)
        config = place.config.ingress_service()

        def open_model(base: str) -> FrontModel:
            weights = place.weights(base)
            gains = gain_series(weights, place.deltas(base), place.config.updates.live)
            return FrontModel(ModelInfo.from_weights(weights), router_for(config, weights, self.clock), gains)

        first = open_model(parse_stamp(place.order().version)[0])
        self.service = IngressService(
            config,
            connect_stations(place.config, handles, self.clock),
            first.info,
            MeshDirectory(place.config, ServeInformant(handles), place.store, self.clock),
            self.clock,
            self.replica,
            first.router,
            self.logger,
            open_model,
            first.gains,
        )
        take_up(place.order, self.service.serving.start)

    async def hold(self, stamps: list[str], wait_s: float) -> dict[str, Any]:
        """Get to know the versions that are to be served; see ``Serving.hold``."""
        return {"replica": self.replica, **(await self.service.serving.hold(stamps))}

    async def serve(self, order: dict[str, Any]) -> dict[str, Any]:
        """Rank with these weights from now on; see ``Serving.take``."""
        said = await self.service.serving.take(ServingOrder.model_validate(order))
        return {"replica": self.replica, **said, "feedback": self.service.feedback.sums()}

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves.

        Raises:
            ConfigError: others could reach it without a token, or the file of tokens cannot be used.
        """
        from cluster.doorstep import Doorstep
        from cluster.front_door import check_wide
        from services.ingress.auth import TokenFile
        from services.ingress.http import create_app

        http = self.place.config.http
        check_wide(http)
        tokens = None
        if http.tokens_file is not None:
            tokens = TokenFile(http.tokens_file, self.clock, self.logger.bind(service="ingress"))
        app = create_app(self.service, tokens)
        Doorstep.take(app.state.first_look)
        return app


def open_ranker(place: Place, base: str, plans: Path | None, logger: JsonLogger) -> LiveSeries[CandidateRanker]:
    """Return the candidate path of a weights version, once it has answered the golden request as it must.

    Args:
        place: The mesh: weights, and how the network is executed.
        base: The version.
        plans: Folder of precision plans; one for this version and machine is obeyed when the backend is ``auto`` and
            the precision is not fixed to float32.
        logger: Told which plans were ignored, and why.

    Raises:
        ConfigError: the machine cannot do what the configuration asks.
        WeightsError: the weights do not load, or an answer differs.
    """
    from models.config import RankerConfig
    from models.quantize.plan import find_plan
    from models.updates.stations import ranker_series

    weights, plan = place.weights(base), None
    wanted = place.config.execution
    if plans is not None and wanted.backend == "auto" and wanted.precision != "float32":
        plan = find_plan(plans, base, RankerConfig.model_validate(weights.json("model")), logger)
    return ranker_series(weights, place.deltas(base), place.execution(base), plan, place.config.updates.live)


def own_station() -> str:
    """Return the station of this replica, e.g. ``embedding:0``."""
    return station_name(serve.get_replica_context().deployment)


def replica_name() -> str:
    """Return the name of this replica: its deployment and Serve's own id for it, e.g. ``embedding-0-3k9q1x2z``."""
    replica = serve.get_replica_context().replica_id
    return f"{replica.deployment_id.name}-{replica.unique_id}"


def gpu_activity(config: MeshConfig) -> Activity | None:
    """Return what to read the activity of this replica's GPU from; None where that is not what it scales by.

    Raises:
        ConfigError: it has no GPU, or one that cannot tell.
    """
    own = own_station()
    scaling = station_configs(config)[own].autoscaling
    if scaling is None or scaling.signal != "sm":
        return None
    devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if not devices:
        raise ConfigError(
            f"autoscaling.signal sm needs a GPU for each replica of {own}, num_gpus is 0",
            field="autoscaling.signal",
            value="sm",
        )
    return SmActivity(NvmlSampler(devices[0]))
