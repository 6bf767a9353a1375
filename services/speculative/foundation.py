"""Foundation worker: computes speculative embeddings of pairs that have just been ranked, after the answer is out.

At this stage the foundation model is the ranker's own full network.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from models.features import FeatureExtractor
from models.golden import Golden
from models.source import WeightSource
from models.stations import CandidateRanker
from services.meter import Meter, Timer
from services.speculative.config import FoundationConfig
from services.stamps import check_stamps
from services.worker import Worker, WorkerLoad
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import InvalidRequestError, StageUnavailableError
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.speculative import PrecomputedBatch, SpeculativeTask
from shared.schema.stamp import Stamp
from shared.schema.user import UserState
from shared.weights.held import OneVersion, Versions

STATION = "foundation"


class FoundationService:
    """One foundation worker.

    Args:
        config: Configuration.
        versions: The candidate path by weights version.
        clock: Time.
        replica: Name of this replica.
        logger: Where failed calls are logged.
        executor: Computes embeddings, in order; None: a thread of its own.
    """

    def __init__(
        self,
        config: FoundationConfig,
        versions: Versions[CandidateRanker],
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.meter = Meter(STATION, replica, clock, logger)
        self._config = config
        self._versions = versions
        self._worker = Worker(STATION, config.queue_max, executor=executor, clock=clock)
        self._clock = clock
        self._replica = replica

    @classmethod
    def from_weights(
        cls,
        config: FoundationConfig,
        source: WeightSource,
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
    ) -> Self:
        """Build a replica from a weights version.

        Raises:
            WeightsError: the weights do not answer their golden request.
        """
        ranker = CandidateRanker.from_weights(source)
        Golden.from_weights(source).check_ranker(ranker, FeatureExtractor.from_weights(source))
        return cls(config, OneVersion(source.version, ranker), clock, replica, logger)

    async def precompute(
        self,
        task: SpeculativeTask,
        positions: npt.NDArray[np.int32],
        features: FeatureBatch,
        state: UserState | None,
        *rows: EmbeddingRows | None,
    ) -> PrecomputedBatch:
        """Evaluate the full network on some candidates of a request that was answered.

        Args:
            task: Whose embeddings, and for which time.
            positions: int32 [K], the candidates, as positions in the request.
            features: All candidates of the request.
            state: The user; None: cold start.
            *rows: Rows of every shard, None where a shard gave none.

        Raises:
            VersionMismatchError: an input belongs to another request, or to another weights version.
            InvalidRequestError: no position, more than the limit, or one that is not in the request.
            DeadlineExceededError: nobody waits any more.
            OverloadedError: too many batches wait here.
            StageUnavailableError: an embedding is not finite.
        """
        with self.meter.call("precompute", task.request_id):
            deadline = Deadline.after_ms(task.remaining_ms, self._clock)
            ranker = await self._versions.get(task.version, STATION)
            stamps = [part.stamp for part in (features, state, *rows) if part is not None]
            check_stamps(stamps, task.request_id, task.version, STATION)
            self._check_positions(positions, features.num_candidates)
            tensors = None if state is None else state.tensors
            vectors, compute_ms = await self._worker.run(
                deadline, self._embed, ranker, features, positions, tensors, rows
            )
            self.meter.add("pairs_total", len(positions))
            self.meter.computed("precompute", compute_ms)
            return PrecomputedBatch(
                stamp=Stamp(task.request_id, task.version, STATION, self._replica, compute_ms),
                candidate_keys=features.candidate_keys[positions],
                group_keys=features.group_keys[positions],
                vectors=vectors,
                as_of_s=task.as_of_s,
            )

    def load(self) -> WorkerLoad:
        """Return how busy the compute thread is."""
        return self._worker.load()

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        return self.meter.metrics.render()

    def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        counters = {**self.meter.counters(), "queued": self._worker.num_held}
        return {
            "station": STATION,
            "replica": self._replica,
            **self._versions.report().body(),
            "counters": counters,
            "execution": str(self._versions.newest().execution),
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check; it runs on the loop, which a pass on the worker thread leaves free."""

    async def aclose(self) -> None:
        """Drop what waits and stop the thread."""
        self._worker.close()

    def _embed(
        self,
        ranker: CandidateRanker,
        features: FeatureBatch,
        positions: npt.NDArray[np.int32],
        tensors: dict[str, npt.NDArray[np.float32]] | None,
        rows: tuple[EmbeddingRows | None, ...],
    ) -> tuple[npt.NDArray[np.float32], float]:
        timer = Timer(self._clock)
        vectors = ranker.embed(features, positions, tensors, rows)
        if not np.isfinite(vectors).all():
            raise StageUnavailableError("the foundation pass made embeddings that are not finite", stage=STATION)
        return vectors, timer.elapsed_ms()

    def _check_positions(self, positions: npt.NDArray[np.int32], num_candidates: int) -> None:
        count, limit = len(positions), self._config.candidates_max
        if not 1 <= count <= limit:
            raise InvalidRequestError(
                f"positions must be 1 to {limit}, are {count}", field="positions", limit=limit, value=count
            )
        if int(positions.min()) < 0 or int(positions.max()) >= num_candidates:
            raise InvalidRequestError(
                f"positions must be in [0, {num_candidates}), are {positions.min()} to {positions.max()}",
                field="positions", limit=num_candidates, value=int(positions.max()),
            )  # fmt: skip
