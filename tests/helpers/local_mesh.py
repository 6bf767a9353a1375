"""All six services and the foundation worker in one process, over a small random model: the mesh without Ray."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from models.config import RankerConfig
from models.features import FeatureExtractor
from models.source import MemorySource
from models.stations import CandidateRanker, RequestEncoder, TableShard
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService
from services.ingress.config import AdmissionConfig, IngressConfig, PrecomputeConfig, StageBudgets, TierConfig
from services.ingress.job import Stations
from services.ingress.model_info import ModelInfo
from services.ingress.service import IngressService
from services.ingress.serving import FrontModel
from services.preprocess.config import PreprocessConfig
from services.preprocess.service import PreprocessService
from services.ranking.config import RankingConfig
from services.ranking.service import RankingService
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from services.speculative.config import FoundationConfig, SpeculativeConfig
from services.speculative.foundation import FoundationService
from services.speculative.service import SpeculativeService
from services.speculative.store import EmbeddingStore
from shared.clock import Clock, SystemClock
from shared.errors import WeightsError
from shared.handle import LocalHandle
from shared.hashing import EntityId
from shared.log import JsonLogger
from shared.schema.api import ApiLimits, RankRequest, RankResponse
from shared.userlog import MemoryUserLog
from shared.weights.held import OneVersion, Versions
from tests.helpers.fake_redis import FakeRedis
from tests.helpers.fake_stations import FakeDirectory
from tests.helpers.faulty import FaultyService
from tests.helpers.weights import random_weights


@dataclass(frozen=True)
class Parts:
    """What the services are made of, built once for each weights version: building takes longer than a test."""

    config: RankerConfig
    extractor: FeatureExtractor
    encoder: RequestEncoder
    ranker: CandidateRanker
    tables: tuple[TableShard, ...]

    @classmethod
    def of(cls, source: MemorySource, num_shards: int) -> Parts:
        """Return the parts of a version, built on first use."""
        key = (id(source), num_shards)
        if key not in _BUILT:
            parts = cls(
                RankerConfig.model_validate(source.json("model")),
                FeatureExtractor.from_weights(source),
                RequestEncoder.from_weights(source),
                CandidateRanker.from_weights(source),
                tuple(TableShard(source, shard, num_shards) for shard in range(num_shards)),
            )
            _BUILT[key] = (source, parts)
        return _BUILT[key][1]


_BUILT: dict[tuple[int, int], tuple[MemorySource, Parts]] = {}
"""The source is kept with its parts, so that its id cannot be given to another one."""


PATIENT = IngressConfig(
    limits=ApiLimits(deadline_ms_default=60_000, deadline_ms_max=60_000),
    tiers=(
        TierConfig(name="full", cost_ms=120, rank_ms=60, timeout_ms=30_000),
        TierConfig(name="light", cost_ms=40, rank_ms=15, timeout_ms=30_000),
    ),
    budgets=StageBudgets(preprocess_ms=30_000, sequence_ms=30_000, embedding_ms=30_000, speculative_ms=30_000),
    precompute=PrecomputeConfig(timeout_ms=30_000),
    admission=AdmissionConfig(work_start=1_000, wait_ms_max=30_000, standing_ms_max=30_000),
)
"""The default configuration with limits that no busy test machine reaches."""


class LocalMesh:
    """A mesh in one process; ``aclose`` it, or use ``running``.

    Args:
        source: Weights; default a tiny random model of 40 items and 20 users.
        clock: Time.
        config: The ingress's configuration, default ``PATIENT``; its number of shards decides how many there are.

    Attributes:
        services: Deployment name -> the service, behind a door that lets tests break it.
        log: The user log; set ``down`` to take it away.
        redis: What the speculative store speaks to; set ``down`` or ``silent``.
        lines: What the services logged.
    """

    def __init__(
        self, source: MemorySource | None = None, clock: Clock | None = None, config: IngressConfig | None = None
    ) -> None:
        self.source = source or random_weights()
        self.clock = clock or SystemClock()
        self.config = config or PATIENT
        self.log = MemoryUserLog()
        self.redis = FakeRedis()
        self.lines = io.StringIO()
        self._logger = JsonLogger(stream=self.lines, clock=self.clock)
        self.services = {name: FaultyService(part, self.clock) for name, part in self._build(self.source).items()}
        self.stations = self._connect()
        self.directory = FakeDirectory(["ingress", *self.services])
        self.ingress = IngressService(
            self.config,
            self.stations,
            ModelInfo.from_weights(self.source),
            self.directory,
            self.clock,
            "ingress-0",
            logger=self._logger,
            open_model=self._open_model,
        )

    @classmethod
    @asynccontextmanager
    async def running(cls, *args: Any, **kwargs: Any) -> AsyncIterator[LocalMesh]:
        """Build a mesh and stop its threads at the end of the block."""
        mesh = cls(*args, **kwargs)
        try:
            yield mesh
        finally:
            await mesh.aclose()

    async def rank(self, user: EntityId, candidates: Sequence[EntityId], **fields: Any) -> RankResponse:
        """Rank through the ingress; the answer is checked against its schema."""
        request = RankRequest(user_id=user, candidates=list(candidates), **fields)
        return RankResponse.model_validate(await self.ingress.rank(request))

    def replace(self, name: str, version_source: MemorySource) -> None:
        """Put a service with other weights in a deployment's place, as a roll-out does."""
        self.services[name].inner = self._build(version_source)[name]

    def counters(self, name: str) -> dict[str, int]:
        """Return what a service counted."""
        counters: dict[str, int] = self.services[name].inner.status()["counters"]
        return counters

    def in_flight(self) -> int:
        """Calls that run in any station."""
        return sum(service.in_flight for service in self.services.values())

    async def aclose(self) -> None:
        """Stop background work and threads."""
        await self.ingress.aclose()
        for service in self.services.values():
            if hasattr(service.inner, "aclose"):
                await service.inner.aclose()

    def _build(self, source: MemorySource) -> dict[str, Any]:
        parts = Parts.of(source, self.config.num_shards)
        version, clock, logger, held = source.version, self.clock, self._logger, self._held
        speculative = SpeculativeConfig(width=parts.config.speculative_width, store_timeout_ms=30_000)
        store = EmbeddingStore(self.redis, speculative, version, clock)
        return {
            "preprocess": PreprocessService(
                PreprocessConfig(), held("preprocess", version, parts.extractor), clock, "preprocess-0", logger
            ),
            "sequence": SequenceService(
                SequenceConfig(store_timeout_ms=30_000),
                held("sequence", version, parts.encoder),
                self.log,
                clock,
                "sequence-0",
                logger,
            ),
            **{
                f"embedding:{shard}": EmbeddingService(
                    EmbeddingConfig(shard=shard, num_shards=self.config.num_shards),
                    held(f"embedding:{shard}", version, tables),
                    clock,
                    f"embedding-{shard}-0",
                    logger,
                )
                for shard, tables in enumerate(parts.tables)
            },
            "speculative": SpeculativeService(
                speculative, held("speculative", version, store), clock, "speculative-0", logger
            ),
            "foundation": FoundationService(
                FoundationConfig(), held("foundation", version, parts.ranker), clock, "foundation-0", logger
            ),
            **{
                f"ranking:{tier.name}": RankingService(
                    RankingConfig(tier=tier.name),
                    held(f"ranking:{tier.name}", version, parts.ranker),
                    clock,
                    f"ranking-{tier.name}-0",
                    logger,
                )
                for tier in self.config.tiers
            },
        }

    def _open_model(self, version: str) -> FrontModel:
        """Return what the ingress needs of another version."""
        raise WeightsError(f"this mesh has one version, is asked for {version}")

    def _held(self, station: str, version: str, part: Any) -> Versions[Any]:
        """Return what a station answers for."""
        return OneVersion(version, part)

    def _connect(self) -> Stations:
        handles = {name: LocalHandle(name, service) for name, service in self.services.items()}
        return Stations(
            preprocess=handles["preprocess"],
            sequence=handles["sequence"],
            embedding=tuple(handles[f"embedding:{shard}"] for shard in range(self.config.num_shards)),
            speculative=handles["speculative"],
            ranking={tier.name: handles[f"ranking:{tier.name}"] for tier in self.config.tiers},
            foundation=handles["foundation"],
        )
