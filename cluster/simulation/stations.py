"""The stations of a simulated mesh: production services where they hold state or decide, over known networks.

Embedding, sequence and speculative are the services of ``services/``. Preprocess, ranking and foundation, whose
services are thin around a network, are thin around a known one here; they wait in the production ``Worker``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cluster.simulation.numbers import WIDTH, KnownEncoder, KnownExtractor, KnownFoundation, KnownRanker, KnownRows
from models.stations import RequestEncoder
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from services.speculative.config import SpeculativeConfig
from services.speculative.series import StoreSeries
from services.speculative.service import SpeculativeService
from services.speculative.store import EmbeddingStore, HashClient
from services.stamps import check_stamps
from services.worker import Worker
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import VersionMismatchError
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
from shared.schema.user import UserState
from shared.userlog import UserLog
from shared.weights.held import HeldVersions, Series

PartT = TypeVar("PartT")

QUIET = JsonLogger("error", io.StringIO())
"""What failed is in the report of a world."""

SEQUENCE = SequenceConfig(queue_max=12, store_timeout_ms=60, cached_users_max=4)
SPECULATIVE = SpeculativeConfig(width=WIDTH, store_timeout_ms=40, fill_timeout_ms=200)
RANKING_QUEUE_MAX = 12
FOUNDATION_QUEUE_MAX = 2

_NO_THREAD = ThreadPoolExecutor(1)
"""Never given anything: a simulated loop runs blocking work itself."""


class WholeSeries(Generic[PartT]):
    """A version without deltas.

    Args:
        base: Its name.
        part: What answers for it.
    """

    def __init__(self, base: str, part: PartT) -> None:
        self._base = base
        self._part = part

    def advance(self, sequence: int) -> None:
        """Take up nothing but the version itself.

        Raises:
            VersionMismatchError: a delta is asked for.
        """
        if sequence == 0:
            return
        raise VersionMismatchError(f"{self._base} has no delta {sequence}", asked=str(sequence), held=self._base)

    def at(self, stamp: str) -> PartT:
        """Return the part.

        Raises:
            VersionMismatchError: another state is asked for.
        """
        if stamp != self._base:
            raise VersionMismatchError(f"asked for {stamp}, held is {self._base}", asked=stamp, held=self._base)
        return self._part

    def stamps(self) -> tuple[str, ...]:
        """Return the version."""
        return (self._base,)

    def keep(self, stamps: Collection[str]) -> None:
        """There is nothing to let go of."""


def held(open_series: Callable[[str], Series[PartT]], stamps: tuple[str, ...]) -> HeldVersions[PartT]:
    """Return the versions of a replica that starts now."""
    versions = HeldVersions(open_series, _NO_THREAD)
    versions.start(stamps)
    return versions


def whole(make: Callable[[str], PartT], stamps: tuple[str, ...]) -> HeldVersions[PartT]:
    """Return versions without deltas."""
    return held(lambda base: WholeSeries(base, make(base)), stamps)


class PreprocessStation:
    """One replica of preprocess."""

    def __init__(self, replica: str, clock: Clock, stamps: tuple[str, ...]) -> None:
        self.versions = whole(lambda base: KnownExtractor(replica), stamps)
        self._clock = clock

    async def extract(self, task: PreprocessTask) -> FeatureBatch:
        """See ``PreprocessService.extract``."""
        Deadline.after_ms(task.remaining_ms, self._clock).check("preprocess")
        return (await self.versions.get(task.version, "preprocess")).extract(task)


class RankingStation:
    """One replica of a tier."""

    def __init__(self, tier: str, replica: str, clock: Clock, stamps: tuple[str, ...], executor: Executor) -> None:
        self.versions = whole(lambda base: KnownRanker(base, tier, replica), stamps)
        self.worker = Worker(f"ranking:{tier}", RANKING_QUEUE_MAX, executor=executor)
        self._station = f"ranking:{tier}"
        self._clock = clock

    async def rank(
        self,
        task: RankTask,
        features: FeatureBatch,
        state: UserState | None,
        spec: SpeculativeEmbeddings | None,
        *rows: EmbeddingRows | None,
    ) -> RankedList:
        """See ``RankingService.rank``."""
        deadline = Deadline.after_ms(task.remaining_ms, self._clock)
        ranker = await self.versions.get(task.version, self._station)
        upstream = [part.stamp for part in (features, state, spec, *rows) if part is not None]
        check_stamps(upstream, task.request_id, task.version, self._station)
        return await self.worker.run(deadline, ranker.rank, task, features, state, spec, rows)


class FoundationStation:
    """One foundation worker."""

    def __init__(self, replica: str, clock: Clock, stamps: tuple[str, ...], executor: Executor) -> None:
        self.versions = whole(lambda base: KnownFoundation(replica), stamps)
        self.worker = Worker("foundation", FOUNDATION_QUEUE_MAX, executor=executor)
        self._clock = clock

    async def precompute(
        self,
        task: SpeculativeTask,
        positions: npt.NDArray[np.int32],
        features: FeatureBatch,
        state: UserState | None,
        *rows: EmbeddingRows | None,
    ) -> PrecomputedBatch:
        """See ``FoundationService.precompute``."""
        deadline = Deadline.after_ms(task.remaining_ms, self._clock)
        network = await self.versions.get(task.version, "foundation")
        stamps = [part.stamp for part in (features, state, *rows) if part is not None]
        check_stamps(stamps, task.request_id, task.version, "foundation")
        return await self.worker.run(deadline, network.precompute, task, positions, features, state)


def embedding(shard: int, num_shards: int, replica: str, clock: Clock, stamps: tuple[str, ...]) -> Any:
    """Return one replica of a shard, with its versions."""
    versions = whole(lambda base: KnownRows(base, shard), stamps)
    config = EmbeddingConfig(shard=shard, num_shards=num_shards)
    return _with(EmbeddingService(config, versions, clock, replica, QUIET), versions)


def sequence(log: UserLog, replica: str, clock: Clock, stamps: tuple[str, ...], executor: Executor) -> Any:
    """Return one replica of sequence, with its versions."""
    versions = whole(KnownEncoder, stamps)
    encoders = cast(HeldVersions[RequestEncoder], versions)
    return _with(SequenceService(SEQUENCE, encoders, log, clock, replica, QUIET, executor), versions)


def speculative(client: HashClient, replica: str, clock: Clock, stamps: tuple[str, ...]) -> Any:
    """Return one replica of the speculative cache, with its versions."""
    versions = held(
        lambda base: StoreSeries(base, lambda stamp: EmbeddingStore(client, SPECULATIVE, stamp, clock)), stamps
    )
    return _with(SpeculativeService(SPECULATIVE, versions, clock, replica, QUIET), versions)


def _with(service: Any, versions: HeldVersions[Any]) -> Any:
    service.versions = versions
    return service
