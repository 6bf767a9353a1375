"""The inputs of ranking: their calls, how long each is waited for, and what happens when one fails.

::

    features = preprocess.extract(task)                    needed: tried twice, then the request fails
    state    = sequence.encode(task)                       optional: without it, the learned cold start
    rows[s]  = embedding:s.lookup(features, budget)        optional: without it, out-of-vocabulary rows
    spec     = speculative.lookup(task, features)          optional: without it, no speculative embedding

All start at once; lookups take the features as a pending result. Waiting tells only that a call has *ended*: its value,
and so its failure, stays out of this process until something that used it fails (``repair``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.ingress.config import StageBudgets
from services.ingress.job import Marks, RankJob, Stations
from services.ingress.leg import Leg, all_ended, is_past
from shared.clock import Clock
from shared.errors import RankMeshError, StageUnavailableError
from shared.handle import Call, Handle
from shared.schema.features import PreprocessTask
from shared.schema.user import EncodeTask


class Inputs:
    """The pending inputs of one request; ``close`` them whatever happens.

    Args:
        job: The request.
        stations: Whom to call.
        budgets: Limits of the stages.
        rank_ms: Time kept back for the ranking call, milliseconds.
        marks: Where dropped inputs are written.
        clock: Time.
    """

    def __init__(
        self, job: RankJob, stations: Stations, budgets: StageBudgets, rank_ms: float, marks: Marks, clock: Clock
    ) -> None:
        self._job = job
        self._stations = stations
        self._budgets = budgets
        self._marks = marks
        self._clock = clock
        self._held: list[Leg] = []
        self._end_s = job.deadline.share(rank_ms + budgets.render_ms).at_s
        self._last_s = job.deadline.share(budgets.render_ms).at_s
        self.retried: list[str] = []
        self.features_s = clock.monotonic_s()
        self.spec: Leg | None = None
        self.rows: list[Leg | None] = []
        try:
            self.features = self._start_features()
            self.state: Leg | None = self._start_state()
            self._start_chained()
        except BaseException:
            self.close()  # nobody else knows yet of the calls that did start
            raise

    async def gather(self) -> None:
        """Wait for the features, then until every optional input has ended or is given up.

        Raises:
            DeadlineExceededError: no features, and no time left to wait for them.
            StageUnavailableError: no features from two replicas.
        """
        await self._await_features()
        await self._await_optional()

    async def repair(self) -> bool:
        """Find the inputs that failed; start each once more, and go on without those that fail again.

        Returns:
            Whether any input was broken.

        Raises:
            RankMeshError: the features failed and another attempt cannot help.
        """
        was_broken = False
        while broken := await self._broken():
            was_broken = True
            for leg, error in broken:
                may_retry = error.retryable and not leg.retried and not self._is_late()
                if leg is self.features:
                    if not may_retry:
                        raise error
                    self._restart_features()
                elif may_retry:
                    self._restart(leg)
                else:
                    self._drop(leg, f"{error.code}: {error.message}")
            await self.gather()
        return was_broken

    def calls(self) -> tuple[Call[object] | None, ...]:
        """Return what a ranking call takes after its task: features, state, spec and the rows of every shard."""
        optional = (self.state, self.spec, *self.rows)
        return (self.features.call, *(None if leg is None else leg.call for leg in optional))

    def bars(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end (monotonic seconds) of every optional input that arrived."""
        for leg in self._optional():
            if leg.ended_s is not None:
                start_s = leg.started_s if leg is self.state else max(leg.started_s, self.features_s)
                yield leg.name, start_s, max(leg.ended_s, start_s)

    @property
    def whole(self) -> bool:
        """Whether every input that the request asked for is there."""
        return self.state is not None and None not in self.rows

    def close(self) -> None:
        """Cancel every call that has not ended."""
        for leg in self._held:
            leg.cancel()

    # --- starting -------------------------------------------------------------------------------------------------

    def _start(self, name: str, handle: Handle, method: str, *args: object, payload_bytes: int) -> Leg:
        leg = Leg(name, handle.call(method, *args, payload_bytes=payload_bytes), self._clock)
        self._held.append(leg)
        return leg

    def _start_features(self) -> Leg:
        job = self._job
        task = PreprocessTask(
            job.request_id, job.version, job.surface, job.block, self._budget_ms(self._budgets.preprocess_ms)
        )
        return self._start("preprocess", self._stations.preprocess, "extract", task, payload_bytes=job.whole_bytes)

    def _start_state(self) -> Leg:
        job = self._job
        task = EncodeTask(
            job.request_id, job.version, job.user, job.surface, job.as_of_s, self._budget_ms(self._budgets.sequence_ms)
        )
        return self._start("sequence", self._stations.sequence, "encode", task, payload_bytes=job.whole_bytes)

    def _start_rows(self, shard: int) -> Leg:
        return self._start(
            f"embedding:{shard}",
            self._stations.embedding[shard],
            "lookup",
            self.features.call,
            self._budget_ms(self._budgets.embedding_ms),
            payload_bytes=self._job.whole_bytes,
        )

    def _start_spec(self) -> Leg:
        task = self._job.speculative_task(self._budget_ms(self._budgets.speculative_ms))
        return self._start(
            "speculative",
            self._stations.speculative,
            "lookup",
            task,
            self.features.call,
            payload_bytes=self._job.whole_bytes,
        )

    def _start_chained(self) -> None:
        self.rows = [self._start_rows(shard) for shard in range(len(self._stations.embedding))]
        self.spec = self._start_spec() if self._job.speculative else None

    def _budget_ms(self, stage_ms: float) -> float:
        return min(stage_ms, self._job.deadline.to_wire_ms())

    def _restart(self, leg: Leg) -> None:
        self.retried.append(leg.name)
        if leg is self.state:
            self.state = fresh = self._start_state()
        elif leg is self.spec:
            self.spec = fresh = self._start_spec()
        else:
            shard = self.rows.index(leg)
            self.rows[shard] = fresh = self._start_rows(shard)
        fresh.retried = True

    def _restart_features(self) -> None:
        for leg in (self.features, self.spec, *self.rows):
            if leg is not None:
                leg.cancel()
        self.retried.append(self.features.name)
        self.features = self._start_features()
        self.features.retried = True
        self._start_chained()

    # --- waiting --------------------------------------------------------------------------------------------------

    def _optional(self) -> Iterator[Leg]:
        for leg in (self.state, self.spec, *self.rows):
            if leg is not None:
                yield leg

    async def _broken(self) -> list[tuple[Leg, RankMeshError]]:
        """Return the inputs that failed; the features alone when they did, since what hangs on them cannot be well."""
        for legs in ([self.features], list(self._optional())):
            unknown = [leg for leg in legs if not leg.is_sound]
            errors = await asyncio.gather(*(leg.failure(self._last_s) for leg in unknown))
            if broken := [(leg, error) for leg, error in zip(unknown, errors, strict=True) if error is not None]:
                return broken
        return []

    def _is_late(self) -> bool:
        return is_past(self._end_s, self._clock)

    async def _await_features(self) -> None:
        """Wait for the one input that nothing can replace; when a replica hangs, another one is asked."""
        end_s = self._last_s
        budget_s = self._budgets.preprocess_ms / 1e3
        await all_ended([self.features], min(self._clock.monotonic_s() + budget_s, end_s), self._clock)
        if not self.features.ended and not self.features.retried and not is_past(end_s, self._clock):
            self._restart_features()
            await all_ended([self.features], min(self._clock.monotonic_s() + budget_s, end_s), self._clock)
        if not self.features.ended:
            if is_past(end_s, self._clock):
                raise self._job.deadline.error("preprocess")
            message = f"preprocess did not answer within {self._budgets.preprocess_ms:.0f} ms, twice"
            raise StageUnavailableError(message, stage="preprocess")
        self.features_s = self.features.ended_s or self._clock.monotonic_s()

    def _limit(self, leg: Leg) -> tuple[float, float]:
        """Return a stage's own budget in milliseconds, and the monotonic second at which it ends for this call."""
        if leg is self.state:
            return self._budgets.sequence_ms, leg.started_s + self._budgets.sequence_ms / 1e3
        budget_ms = self._budgets.speculative_ms if leg is self.spec else self._budgets.embedding_ms
        return budget_ms, max(leg.started_s, self.features_s) + budget_ms / 1e3

    async def _await_optional(self) -> None:
        while waiting := [leg for leg in self._optional() if not leg.ended]:
            await all_ended(waiting, min(self._end_s, *(self._limit(leg)[1] for leg in waiting)), self._clock)
            for leg in waiting:
                if leg.ended:
                    continue
                budget_ms, limit_s = self._limit(leg)
                if self._is_late():
                    self._marks.add_deadline(self._job.deadline)
                    self._drop(leg, "not ready when the deadline left time for ranking only")
                elif is_past(limit_s, self._clock) or leg.watcher.done():
                    self._drop(leg, f"not ready within {budget_ms:.0f} ms")

    def _drop(self, leg: Leg, reason: str) -> None:
        leg.cancel()
        self._marks.add(leg.name, reason)
        if leg is self.state:
            self.state = None
        elif leg is self.spec:
            self.spec = None
        else:
            self.rows[self.rows.index(leg)] = None
