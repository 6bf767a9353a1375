"""What Ray Serve runs: one thin class a station, around the plain service of ``services/``.

Each class is built inside its replica's process and imports its service there, so that a replica loads what it needs
and no more (torch takes 2 s and 200 MB; preprocess, speculative and ingress do without). A station with a model is
built only when its part of the golden request gives the golden answers: Serve sends it no call before that.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import MeshConfig
from shared.clock import SystemClock
from shared.errors import ConfigError
from shared.log import JsonLogger, Level
from shared.settings import load_settings
from shared.userlog import StoreConfig
from shared.weights import WeightReader, WeightStore
from shared.weights.held import OneVersion

if TYPE_CHECKING:
    from fastapi import FastAPI
    from numpy.typing import NDArray

    from models.execution_config import Execution
    from models.stations import CandidateRanker
    from shared.hashing import EntityId
    from shared.schema.api import Event
    from shared.schema.embeddings import EmbeddingRows
    from shared.schema.features import FeatureBatch, PreprocessTask
    from shared.schema.ranking import RankedList, RankTask
    from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
    from shared.schema.user import EncodeTask, UserState


P = ParamSpec("P")
ResultT = TypeVar("ResultT")

START_NICENESS = 10
"""What a start adds: about a tenth of the share of a replica that serves, so that a start under overload still ends."""

NICENESS_MAX = 19


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
    """

    config: MeshConfig
    version: str
    weights_url: str
    store: StoreConfig
    plans: str
    search: str

    def weights(self) -> WeightReader:
        """Open the weights version."""
        return WeightStore(self.weights_url).open(self.version)

    def execution(self) -> Execution:
        """Choose the kernels and the dtype of this replica, for the machine that it is on.

        Raises:
            ConfigError: the machine cannot do what the configuration asks.
        """
        from models.config import RankerConfig
        from models.execution import choose_execution  # imports torch
        from models.tuning import tuned_execution

        backend, precision = self.config.execution.backend, self.config.execution.precision
        if backend == "auto":
            model = RankerConfig.model_validate(self.weights().json("model"))
            if (tuned := tuned_execution(model, precision, Path(self.search))) is not None:
                return tuned
        return choose_execution(backend, precision)


def quietly(work: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """Run work at a low priority, so that a successor's start takes no time from the replicas that serve.

    Importing torch, loading weights and the golden request cost seconds of a core. Niceness is a property of a thread
    on Linux and can only be raised without privileges, so the work has a thread of its own; what runs later in this
    process is as fast as ever. It counts because replicas themselves run at normal priority (``RAY_worker_niceness``).
    """

    def start() -> ResultT:
        thread_id = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + START_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread_id, min(niceness, NICENESS_MAX))
        return work(*args, **kwargs)

    with ThreadPoolExecutor(1, thread_name_prefix="quietly") as thread:
        return thread.submit(start).result()


class Station:
    """Base of the stations.

    Args:
        place: The mesh.
        threads: Threads of one torch operation; None for a station without torch.
    """

    service: Any

    def __init__(self, place: Place, threads: int | None) -> None:
        self.place = place
        self.clock = SystemClock()
        self.replica = replica_name()
        settings = load_settings()
        self.logger = JsonLogger(level=cast(Level, settings.log_level), clock=self.clock).bind(mesh=place.config.name)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    async def check_health(self) -> None:
        """Answer Serve's health check."""
        await self.service.check_health()

    async def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        status: dict[str, Any] = self.service.status()
        return status

    async def __del__(self) -> None:
        """Let the service finish: Serve awaits this when it stops a replica in order."""
        service: Any = getattr(self, "service", None)  # none when the constructor failed
        if hasattr(service, "aclose"):
            await service.aclose()


class Preprocess(Station):
    """``preprocess``."""

    def __init__(self, place: Place) -> None:
        from services.preprocess.service import PreprocessService

        super().__init__(place, None)
        self.service = PreprocessService.from_weights(
            place.config.preprocess.service, place.weights(), self.clock, self.replica, self.logger
        )

    async def extract(self, task: PreprocessTask) -> FeatureBatch:
        """See ``PreprocessService.extract``."""
        features: FeatureBatch = await self.service.extract(task)
        return features


class Embedding(Station):
    """``embedding:<shard>``."""

    def __init__(self, place: Place, shard: int) -> None:
        quietly(importlib.import_module, "models.stations")
        from models.features import FeatureExtractor
        from models.golden import Golden
        from models.stations import TableShard
        from services.embedding.service import EmbeddingService

        super().__init__(place, place.config.embedding.replicas.threads)
        config, weights = place.config.embedding_service(shard), place.weights()

        def build() -> TableShard:
            tables = TableShard(weights, config.shard, config.num_shards, config.backend, config.map_dir)
            Golden.from_weights(weights).check_shard(tables, FeatureExtractor.from_weights(weights))
            return tables

        tables = quietly(build)
        self.service = EmbeddingService(
            config, OneVersion(place.version, tables), self.clock, self.replica, self.logger
        )

    async def lookup(self, features: FeatureBatch, remaining_ms: float) -> EmbeddingRows:
        """See ``EmbeddingService.lookup``."""
        rows: EmbeddingRows = await self.service.lookup(features, remaining_ms)
        return rows


class Sequence(Station):
    """``sequence``."""

    def __init__(self, place: Place) -> None:
        quietly(importlib.import_module, "models.stations")
        from models.golden import Golden
        from models.stations import RequestEncoder
        from services.sequence.service import SequenceService
        from shared.userlog import RedisUserLog, connect

        super().__init__(place, place.config.sequence.replicas.threads)
        config, weights = place.config.sequence.service, place.weights()

        def build() -> RequestEncoder:
            encoder = RequestEncoder.from_weights(weights, place.execution())
            Golden.from_weights(weights).check_encoder(encoder)
            return encoder

        encoder = quietly(build)
        log = RedisUserLog(connect(place.store), place.config.user_log())
        self.service = SequenceService(
            config, OneVersion(place.version, encoder), log, self.clock, self.replica, self.logger
        )

    async def encode(self, task: EncodeTask) -> UserState:
        """See ``SequenceService.encode``."""
        state: UserState = await self.service.encode(task)
        return state

    async def append(self, events: list[Event]) -> dict[str, int]:
        """See ``SequenceService.append``."""
        result: dict[str, int] = await self.service.append(events)
        return result

    async def forget(self, user: EntityId) -> bool:
        """See ``SequenceService.forget``."""
        found: bool = await self.service.forget(user)
        return found


class Speculative(Station):
    """``speculative``."""

    def __init__(self, place: Place) -> None:
        from services.speculative.service import SpeculativeService
        from services.speculative.store import EmbeddingStore
        from shared.userlog import connect

        super().__init__(place, None)
        config = place.config.speculative_service(int(place.weights().json("model")["speculative_width"]))
        # The one client class has more than this store uses; Redis Cluster's has the same methods.
        client: Any = connect(place.store)
        store = EmbeddingStore(client, config, place.version, self.clock)
        self.service = SpeculativeService(
            config, OneVersion(place.version, store), self.clock, self.replica, self.logger
        )

    async def lookup(self, task: SpeculativeTask, features: FeatureBatch) -> SpeculativeEmbeddings:
        """See ``SpeculativeService.lookup``."""
        found: SpeculativeEmbeddings = await self.service.lookup(task, features)
        return found

    async def fill(self, task: SpeculativeTask, batch: PrecomputedBatch) -> int:
        """See ``SpeculativeService.fill``."""
        stored: int = await self.service.fill(task, batch)
        return stored


class Foundation(Station):
    """``foundation``."""

    def __init__(self, place: Place) -> None:
        quietly(importlib.import_module, "models.stations")
        from services.speculative.foundation import FoundationService

        part = place.config.foundation
        assert part is not None  # deployed only where there is one
        super().__init__(place, part.replicas.threads)
        ranker = quietly(checked_ranker, place, None, self.logger)
        self.service = FoundationService(
            part.service, OneVersion(place.version, ranker), self.clock, self.replica, self.logger
        )

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
        quietly(importlib.import_module, "models.stations")
        from services.ranking.service import RankingService

        super().__init__(place, place.config.ranking[tier].replicas.threads)
        config, weights = place.config.ranking_service(tier), place.weights()
        if tier not in (tiers := weights.json("model")["tiers"]):
            raise ConfigError(f"ranking must be among {sorted(tiers)}, has {tier!r}", field="ranking", value=tier)
        ranker = quietly(checked_ranker, place, Path(config.plans or place.plans), self.logger)
        self.service = RankingService(config, OneVersion(place.version, ranker), self.clock, self.replica, self.logger)

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
        from services.ingress.model_info import ModelInfo
        from services.ingress.service import IngressService

        super().__init__(place, None)
        self.service = IngressService(
            place.config.ingress_service(),
            connect_stations(place.config, handles),
            ModelInfo.from_weights(place.weights()),
            MeshDirectory(place.config, ServeInformant(handles), place.store, self.clock),
            self.clock,
            self.replica,
            logger=self.logger,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        from services.ingress.http import create_app

        return create_app(self.service)


def checked_ranker(place: Place, plans: Path | None, logger: JsonLogger) -> CandidateRanker:
    """Return the candidate path of a weights version, once it has answered the golden request as it must.

    Args:
        place: The mesh: weights, and how the network is executed.
        plans: Folder of precision plans; one for this version and machine is obeyed when the backend is ``auto`` and
            the precision is not fixed to float32.
        logger: Told which plans were ignored, and why.

    Raises:
        ConfigError: the machine cannot do what the configuration asks.
        WeightsError: the weights do not load, or an answer differs.
    """
    from models.config import RankerConfig
    from models.features import FeatureExtractor
    from models.golden import Golden
    from models.quantize.plan import find_plan
    from models.stations import CandidateRanker

    weights, plan = place.weights(), None
    wanted = place.config.execution
    if plans is not None and wanted.backend == "auto" and wanted.precision != "float32":
        plan = find_plan(plans, place.version, RankerConfig.model_validate(weights.json("model")), logger)
    golden, extractor = Golden.from_weights(weights), FeatureExtractor.from_weights(weights)
    ranker = CandidateRanker.from_weights(weights, place.execution(), plan)
    golden.check_extractor(extractor)  # for preprocess too, whose process has no torch to check with
    golden.check_ranker(ranker, extractor)
    return ranker


def replica_name() -> str:
    """Return the name of this replica: its deployment and Serve's own id for it, e.g. ``embedding-0-3k9q1x2z``."""
    replica = serve.get_replica_context().replica_id
    return f"{replica.deployment_id.name}-{replica.unique_id}"
