"""The inputs of ranking: their calls, how long each is waited for, and what happens when one fails.

::

    features = preprocess.extract(task)                    needed: tried twice, then the request fails
    state    = sequence.encode(task)                       optional: without it, the learned cold start
    rows[s]  = embedding:s.lookup(features, budget)        optional: without it, out-of-vocabulary rows; a slow one
                                                           is asked of a second replica as well (``hedge``)
    spec     = speculative.lookup(task, features)          optional: without it, no speculative embedding

An optional input of a station whose replicas have all fallen silent is not asked for (``shared.breaker``).

All start at once; lookups take the features as a pending result. Waiting tells only that a call has *ended*: its value,
and so its failure, stays out of this process until something that used it fails (``repair``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress

from services.ingress.config import StageBudgets
from services.ingress.hedge import Hedger
from services.ingress.job import Marks, RankJob, Stations
from services.ingress.leg import LOOK_S, LOOK_S_MIN, Leg, all_ended, is_past
from shared.clock import Clock
from shared.errors import RankMeshError, StageSilentError, StageUnavailableError
from shared.handle import Call
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
        hedger: Decides which slow look-ups are made twice.
    """

    def __init__(
        self,
        job: RankJob,
        stations: Stations,
        budgets: StageBudgets,
        rank_ms: float,
        marks: Marks,
        clock: Clock,
        hedger: Hedger,
    ) -> None:
        self._job = job
        self._stations = stations
        self._budgets = budgets
        self._marks = marks
        self._clock = clock
        self._hedger = hedger
        self._slow: set[Leg] = set()  # look-ups of which it is decided whether they are hedged
        self._timed: set[Leg] = set()  # look-ups whose time the hedger knows
        self._held: list[Leg] = []
        self._end_s = job.deadline.share(rank_ms + budgets.render_ms).at_s
        self._last_s = job.deadline.share(budgets.render_ms).at_s
        self.retried: list[str] = []
        self.features_s = clock.monotonic_s()
        self.spec: Leg | None = None
        self.rows: list[Leg | None] = []
        try:
            self.features = self._start_features()
            self.state = self._start_state()
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

    def running(self) -> Iterator[Leg]:
        """Yield the calls that have not ended."""
        return (leg for leg in self._held if not leg.watcher.done())

    def calls(self) -> tuple[Call[object] | None, ...]:
        """Return what a ranking call takes after its task: features, state, spec and the rows of every shard."""
        optional = (self.state, self.spec, *self.rows)
        return (self.features.call, *(None if leg is None else leg.call for leg in optional))

    def bars(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end (monotonic seconds) of every optional input that arrived."""
        for leg in self._optional():
            if leg.ended_s is not None:
                start_s = leg.started_s if leg is self.state else self._asked_s(leg)
                yield leg.name, start_s, max(leg.ended_s, start_s)

    @property
    def hedged(self) -> list[tuple[str, bool]]:
        """Look-ups that were made twice: station, and whether the second call ended first."""
        return [(leg.name, leg.hedge_won) for leg in self._held if leg.hedge is not None]

    @property
    def whole(self) -> bool:
        """Whether every input that the request asked for is there."""
        return self.state is not None and None not in self.rows

    def close(self) -> None:
        """Cancel every call that has not ended."""
        for leg in self._held:
            leg.cancel()

    # --- starting -------------------------------------------------------------------------------------------------

    def _hold(self, name: str, call: Call[object]) -> Leg:
        leg = Leg(name, call, self._clock)
        self._held.append(leg)
        return leg

    def _try(self, name: str, start: Callable[[], Call[object]]) -> Leg | None:
        """Start an optional input; without it the answer is marked."""
        try:
            return self._hold(name, start())
        except StageSilentError as error:
            self._marks.add(name, f"{error.code}: {error.message}")
            return None

    def _start_features(self) -> Leg:
        job = self._job
        task = PreprocessTask(
            job.request_id, job.version, job.surface, job.block, self._budget_ms(self._budgets.preprocess_ms)
        )
        station = self._stations.preprocess
        return self._hold("preprocess", station.call("extract", task, payload_bytes=job.whole_bytes, needed=True))

    def _start_state(self) -> Leg | None:
        job = self._job
        task = EncodeTask(
            job.request_id, job.version, job.user, job.surface, job.as_of_s, self._budget_ms(self._budgets.sequence_ms)
        )
        station = self._stations.sequence
        return self._try("sequence", lambda: station.call("encode", task, payload_bytes=job.whole_bytes))

    def _start_rows(self, shard: int) -> Leg | None:
        return self._try(f"embedding:{shard}", lambda: self._call_rows(shard))

    def _call_rows(self, shard: int) -> Call[object]:
        return self._stations.embedding[shard].call(
            "lookup",
            self.features.call,
            self._budget_ms(self._budgets.embedding_ms),
            payload_bytes=self._job.whole_bytes,
        )

    def _start_spec(self) -> Leg | None:
        job, station = self._job, self._stations.speculative
        task = job.speculative_task(self._budget_ms(self._budgets.speculative_ms))
        inputs = (task, self.features.call)
        return self._try("speculative", lambda: station.call("lookup", *inputs, payload_bytes=job.whole_bytes))

    def _start_chained(self) -> None:
        self.rows = [self._start_rows(shard) for shard in range(len(self._stations.embedding))]
        self.spec = self._start_spec() if self._job.speculative else None

    def _budget_ms(self, stage_ms: float) -> float:
        return min(stage_ms, self._job.deadline.to_wire_ms())

    def _restart(self, leg: Leg) -> None:
        if leg is self.state:
            self.state = fresh = self._start_state()
        elif leg is self.spec:
            self.spec = fresh = self._start_spec()
        else:
            shard = self.rows.index(leg)
            self.rows[shard] = fresh = self._start_rows(shard)
        if fresh is not None:
            fresh.retried = True
            self.retried.append(leg.name)

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
        began_s, budget_s = self._clock.monotonic_s(), self._budgets.preprocess_ms / 1e3
        await self._await_until_vain(self.features, min(began_s + budget_s, end_s))
        if not self.features.ended and not self.features.retried and not is_past(end_s, self._clock):
            self._restart_features()
            await all_ended([self.features], min(began_s + 2 * budget_s, end_s), self._clock)
        if not self.features.ended:
            if is_past(end_s, self._clock):
                raise self._job.deadline.error("preprocess")
            message = f"preprocess did not answer within {self._budgets.preprocess_ms:.0f} ms, twice"
            raise StageUnavailableError(message, stage="preprocess")
        self.features_s = self.features.ended_s or self._clock.monotonic_s()

    async def _await_until_vain(self, leg: Leg, until_s: float) -> None:
        """Wait for a call, but no longer than its replica answers anybody; a small budget may yet go on another one."""
        while not leg.ended and leg.patience_s > 0 and not is_past(until_s, self._clock):
            look_s = self._clock.monotonic_s() + min(max(leg.patience_s, LOOK_S_MIN), LOOK_S)
            await all_ended([leg], min(until_s, look_s), self._clock)

    def _limit(self, leg: Leg) -> tuple[float, float]:
        """Return a stage's own budget in milliseconds, and the monotonic second at which it ends for this call."""
        if leg is self.state:
            return self._budgets.sequence_ms, leg.started_s + self._budgets.sequence_ms / 1e3
        budget_ms = self._budgets.speculative_ms if leg is self.spec else self._budgets.embedding_ms
        return budget_ms, self._asked_s(leg) + budget_ms / 1e3

    async def _await_optional(self) -> None:
        while waiting := [leg for leg in self._optional() if not leg.ended]:
            ends_s = [self._limit(leg)[1] for leg in waiting]
            await all_ended(waiting, min(self._end_s, *ends_s, *self._hedge_times_s().values()), self._clock)
            self._hedge_slow()
            for leg in waiting:
                if leg.ended:
                    continue
                budget_ms, limit_s = self._limit(leg)
                if self._is_late():
                    self._marks.add_deadline(self._job.deadline)
                    self._drop(leg, "not ready when the deadline left time for ranking only")
                elif is_past(limit_s, self._clock) or leg.watcher.done():
                    self._drop(leg, f"not ready within {budget_ms:.0f} ms")

        self._time_rows()

    def _time_rows(self) -> None:
        """Tell the hedger how long the look-ups took."""
        for leg in self.rows:
            if leg is not None and leg.ended_s is not None and leg not in self._timed:
                self._timed.add(leg)
                self._hedger.ended(leg.name, leg.ended_s - self._asked_s(leg))

    def _asked_s(self, leg: Leg) -> float:
        """Return when a call that takes the features could begin."""
        return max(leg.started_s, self.features_s)

    def _hedge_times_s(self) -> dict[Leg, float]:
        """Return when the look-ups are hedged that have neither ended nor been hedged."""
        times_s: dict[Leg, float] = {}
        for leg in self.rows:
            if leg is None or leg.ended or leg in self._slow:
                continue
            if (delay_s := self._hedger.delay_s(leg.name)) is not None:
                times_s[leg] = self._asked_s(leg) + delay_s
        return times_s

    def _hedge_slow(self) -> None:
        for leg, at_s in self._hedge_times_s().items():
            if is_past(at_s, self._clock):
                self._slow.add(leg)
                if not self._is_late() and self._hedger.take():
                    with suppress(StageSilentError):  # no other replica to ask
                        leg.start_hedge(self._call_rows(self.rows.index(leg)))

    def _drop(self, leg: Leg, reason: str) -> None:
        leg.cancel()
        self._marks.add(leg.name, reason)
        if leg is self.state:
            self.state = None
        elif leg is self.spec:
            self.spec = None
        else:
            self.rows[self.rows.index(leg)] = None
