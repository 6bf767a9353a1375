"""The stations of a simulated mesh: production services where they hold state or decide, over known networks.

Embedding, sequence and speculative are the services of ``services/``. Preprocess, ranking and foundation, whose
services are thin around a network, are thin around a known one here; they wait in the production ``Worker``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cluster.simulation.numbers import WIDTH, KnownEncoder, KnownExtractor, KnownFoundation, KnownRanker, KnownRows
from cluster.simulation.world import SECOND
from models.stations import RequestEncoder
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService
from services.ingress.serving import ServingOrder
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from services.speculative.config import SpeculativeConfig
from services.speculative.series import NamedStates
from services.speculative.service import SpeculativeService
from services.speculative.store import EmbeddingStore, HashClient
from services.stamps import check_stamps
from services.worker import Worker
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import StageUnavailableError, WeightsError
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
from shared.schema.user import UserState
from shared.userlog import UserLog
from shared.weights.held import HeldVersions

PartT = TypeVar("PartT")

QUIET = JsonLogger("error", io.StringIO())
"""What failed is in the report of a world."""

SEQUENCE = SequenceConfig(queue_max=12, store_timeout_ms=60, cached_users_max=4)
SPECULATIVE = SpeculativeConfig(width=WIDTH, store_timeout_ms=40, fill_timeout_ms=200)
RANKING_QUEUE_MAX = 12
FOUNDATION_QUEUE_MAX = 2

_NO_THREAD = ThreadPoolExecutor(1)
"""Never given anything: a simulated loop runs blocking work itself."""


class Broken:
    """A part of a version with which no call is answered."""

    def __getattr__(self, name: str) -> Any:
        """Fail.

        Raises:
            StageUnavailableError: always.
        """
        raise StageUnavailableError("this version answers nothing here")


@dataclass(frozen=True, slots=True)
class Weights:
    """What a replica takes its weights from.

    Args:
        station: Whose replica it is.
        order: Tells what is served now, and what is to be held.
        opening: Takes as long as a version is read.
        flaw: Of the second version, at one station; see ``world.Rollout``.
    """

    station: str
    order: Callable[[], ServingOrder]
    opening: Executor
    flaw: tuple[str, str] = ("", "")

    def held(self, make: Callable[[str], PartT]) -> HeldVersions[PartT]:
        """Return the versions of a replica that starts now.

        Args:
            make: From a stamp to the part that answers for it.
        """
        versions = HeldVersions(lambda base: self._open(base, make), self.opening, _NO_THREAD)
        self.start(versions)
        return versions

    def start(self, versions: HeldVersions[Any]) -> None:
        """Let them be what is to be held now, as replicas do before they serve."""
        order = self.order()
        versions.start(order.held or (order.version,), order.version)

    def _open(self, base: str, make: Callable[[str], PartT]) -> NamedStates[PartT]:
        flaw, station = self.flaw
        is_flawed = base == SECOND and station == self.station
        if is_flawed and flaw == "refused":
            raise WeightsError(f"{self.station} cannot read {base}")
        return NamedStates(base, cast(Callable[[str], PartT], lambda stamp: Broken()) if is_flawed else make)


class PreprocessStation:
    """One replica of preprocess."""

    def __init__(self, replica: str, clock: Clock, weights: Weights) -> None:
        self.versions = weights.held(lambda stamp: KnownExtractor(replica))
        self._clock = clock

    async def extract(self, task: PreprocessTask) -> FeatureBatch:
        """See ``PreprocessService.extract``."""
        Deadline.after_ms(task.remaining_ms, self._clock).check("preprocess")
        return (await self.versions.get(task.version, "preprocess")).extract(task)


class RankingStation:
    """One replica of a tier."""

    def __init__(self, tier: str, replica: str, clock: Clock, weights: Weights, executor: Executor) -> None:
        self.versions = weights.held(lambda stamp: KnownRanker(stamp, tier, replica))
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

    def __init__(self, replica: str, clock: Clock, weights: Weights, executor: Executor) -> None:
        self.versions = weights.held(lambda stamp: KnownFoundation(replica))
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


def embedding(shard: int, num_shards: int, replica: str, clock: Clock, weights: Weights) -> Any:
    """Return one replica of a shard, with its versions."""
    versions = weights.held(lambda stamp: KnownRows(stamp, shard))
    config = EmbeddingConfig(shard=shard, num_shards=num_shards)
    return _with(EmbeddingService(config, versions, clock, replica, QUIET), versions)


def sequence(log: UserLog, replica: str, clock: Clock, weights: Weights, executor: Executor) -> Any:
    """Return one replica of sequence, with its versions."""
    versions = weights.held(KnownEncoder)
    encoders = cast(HeldVersions[RequestEncoder], versions)
    return _with(SequenceService(SEQUENCE, encoders, log, clock, replica, QUIET, executor), versions)


def speculative(client: HashClient, replica: str, clock: Clock, weights: Weights) -> Any:
    """Return one replica of the speculative cache, with its versions."""
    versions = weights.held(lambda stamp: EmbeddingStore(client, SPECULATIVE, stamp, clock))
    return _with(SpeculativeService(SPECULATIVE, versions, clock, replica, QUIET), versions)


def _with(service: Any, versions: HeldVersions[Any]) -> Any:
    service.versions = versions
    return service
