"""Ranking: one tier's passes over the candidates, from what the other stations brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from models.config import RankerConfig
from models.features import FeatureExtractor
from models.golden import Golden
from models.passes import Steps
from models.quantize.plan import find_plan
from models.source import WeightSource
from models.stations import SIGNALS_NAME, CandidateRanker, RankAsk, Ranking, StateArrays
from services.meter import Meter
from services.ranking.batching import Batcher
from services.ranking.config import RankingConfig
from services.stamps import check_stamps
from services.worker import Checkpoint, Worker, WorkerLoad
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import ConfigError, RankMeshError, StageUnavailableError
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import SpeculativeEmbeddings
from shared.schema.stamp import Stamp
from shared.schema.user import UserState
from shared.weights.held import OneVersion, Versions


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request with all that it is ranked from."""

    ranker: CandidateRanker
    task: RankTask
    ask: RankAsk
    state: UserState | None
    upstream: tuple[Stamp, ...]


class RankingService:
    """One replica of one tier.

    Args:
        config: Configuration.
        versions: The candidate path by weights version.
        clock: Time.
        replica: Name of this replica.
        logger: Where failed calls are logged.
    """

    def __init__(
        self,
        config: RankingConfig,
        versions: Versions[CandidateRanker],
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
    ) -> None:
        self.station = f"ranking:{config.tier}"
        self.meter = Meter(self.station, replica, clock, logger, {"tier": (config.tier,)})
        self._tier = config.tier
        self._micro_batch = config.micro_batch
        self._versions = versions
        self._worker = Worker(self.station, config.queue_max, clock=clock)
        self._clock = clock
        self._replica = replica
        self._batcher: Batcher[_Asked, RankedList] | None = None
        if config.batch_max > 1:
            wait_ms, queue_max = config.batch_wait_ms, config.queue_max
            self._batcher = Batcher(
                self.station, self._worker, self._rank_together, config.batch_max, wait_ms, queue_max, clock
            )

    @classmethod
    def from_weights(
        cls, config: RankingConfig, source: WeightSource, clock: Clock, replica: str, logger: JsonLogger | None = None
    ) -> Self:
        """Build a replica from a weights version.

        Raises:
            ConfigError: the model has no such tier.
            WeightsError: the weights do not answer their golden request.
        """
        tiers = sorted(source.json("model")["tiers"])
        if config.tier not in tiers:
            raise ConfigError(f"tier must be one of {tiers}, is {config.tier!r}", field="tier", value=config.tier)
        plan = None
        if config.plans is not None:
            model = RankerConfig.model_validate(source.json("model"))
            plan = find_plan(Path(config.plans), source.version, model, logger or JsonLogger())
        ranker = CandidateRanker.from_weights(source, plan=plan)
        Golden.from_weights(source).check_ranker(ranker, FeatureExtractor.from_weights(source))
        return cls(config, OneVersion(source.version, ranker), clock, replica, logger)

    async def rank(
        self,
        task: RankTask,
        features: FeatureBatch,
        state: UserState | None,
        spec: SpeculativeEmbeddings | None,
        *rows: EmbeddingRows | None,
    ) -> RankedList:
        """Order the candidates of one request.

        Args:
            task: Which request, version and length of the answer.
            features: The candidates.
            state: The user; None: cold start.
            spec: Speculative embeddings; None: none.
            *rows: Rows of every shard, None where a shard gave none.

        Raises:
            VersionMismatchError: an input belongs to another request, or to another weights version.
            DeadlineExceededError: the request expired while it waited, or between two passes.
            OverloadedError: too many requests wait here.
            StageUnavailableError: a score is not finite.
        """
        with self.meter.call("rank", task.request_id):
            deadline = Deadline.after_ms(task.remaining_ms, self._clock)
            ranker = await self._versions.get(task.version, self.station)
            upstream = tuple(part.stamp for part in (features, state, spec, *rows) if part is not None)
            check_stamps(upstream, task.request_id, task.version, self.station)
            ask = RankAsk(features, _tensors(state), rows, spec, task.limit, task.explores)
            asked = _Asked(ranker, task, ask, state, upstream)
            if self._batcher is None:
                ranked = await self._worker.run_in_steps(deadline, self._rank, asked)
            else:
                ranked = await self._batcher.submit(deadline, asked)
            self._count(ranked, features.num_candidates)
            return ranked

    def _rank(self, checkpoint: Checkpoint, asked: _Asked) -> RankedList:
        start_s, ask = self._clock.monotonic_s(), asked.ask
        steps = Steps(self._micro_batch, checkpoint)
        ranking = asked.ranker.rank(
            ask.features, ask.state, ask.rows, ask.speculative, self._tier, ask.limit, steps, exits=ask.exits
        )
        return self._ranked(asked, ranking, (self._clock.monotonic_s() - start_s) * 1e3)

    def _rank_together(
        self, checkpoint: Callable[[], None], batch: Sequence[_Asked]
    ) -> list[RankedList | RankMeshError]:
        """Rank a batch, those of each weights version as one; compute time is shared evenly."""
        outcomes: dict[int, RankedList | RankMeshError] = {}
        for ranker in {id(asked.ranker): asked.ranker for asked in batch}.values():
            own = [index for index, asked in enumerate(batch) if asked.ranker is ranker]
            start_s = self._clock.monotonic_s()
            rankings = ranker.rank_together(
                [batch[index].ask for index in own], self._tier, Steps(self._micro_batch, checkpoint)
            )
            compute_ms = (self._clock.monotonic_s() - start_s) * 1e3 / len(own)
            for index, ranking in zip(own, rankings, strict=True):
                try:
                    if isinstance(ranking, RankMeshError):
                        raise ranking
                    outcomes[index] = self._ranked(batch[index], ranking, compute_ms)
                except RankMeshError as error:
                    outcomes[index] = error
        return [outcomes[index] for index in range(len(batch))]

    def _ranked(self, asked: _Asked, ranking: Ranking, compute_ms: float) -> RankedList:
        if not (np.isfinite(ranking.scores).all() and np.isfinite(ranking.values).all()):
            raise StageUnavailableError(f"{self.station} made scores that are not finite", stage=self.station)
        task, state, tensors = asked.task, asked.state, asked.ask.state
        return RankedList(
            stamp=Stamp(task.request_id, task.version, self.station, self._replica, compute_ms),
            order=ranking.order,
            scores=ranking.scores,
            values=ranking.values,
            full_pass=ranking.full_pass,
            levels=ranking.levels,
            missing_shards=ranking.missing_shards,
            cold_start=ranking.cold_start,
            history_degraded="" if state is None else state.degraded,
            history_length=0 if state is None else state.history_length,
            upstream=asked.upstream,
            first_pass_ms=ranking.first_pass_ms,
            full_pass_ms=ranking.full_pass_ms,
            num_oov=asked.ask.features.num_oov,
            signals=None if tensors is None else tensors.get(SIGNALS_NAME),
            exits=ranking.exits,
        )

    def _count(self, ranked: RankedList, num_candidates: int) -> None:
        self.meter.computed("rank", ranked.stamp.compute_ms)
        passes: tuple[tuple[str, int, float], ...] = (
            ("first", num_candidates, ranked.first_pass_ms),
            ("full", int(ranked.full_pass.sum()), ranked.full_pass_ms),
        )
        for scored_by, number, pass_ms in passes:
            if number:
                self.meter.add("candidates_total", number, tier=self._tier, scored_by=scored_by)
                self.meter.metrics.observe("pass_ms", pass_ms, tier=self._tier, scored_by=scored_by)

    def load(self) -> WorkerLoad:
        """Return how busy the compute thread is."""
        return self._worker.load()

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        return self.meter.metrics.render()

    def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        num_waiting = 0 if self._batcher is None else self._batcher.num_waiting
        counters = {**self.meter.counters(), "queued": self._worker.num_held + num_waiting}
        return {
            "station": self.station,
            "replica": self._replica,
            **self._versions.report().body(),
            "counters": counters,
            "execution": str(self._versions.newest().execution),
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check; it runs on the loop, which a pass on the worker thread leaves free."""

    async def aclose(self) -> None:
        """Drop what waits and stop the thread."""
        if self._batcher is not None:
            self._batcher.close()
        self._worker.close()


def _tensors(state: UserState | None) -> StateArrays | None:
    return None if state is None else state.tensors
