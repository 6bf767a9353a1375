"""Admission: what cannot be answered in time is refused at once and told when to come back, before any work.

A rank request is let in when the time that it will take, by the measured capacity (``capacity``), fits into a share of
its budget, or of less where a queue stands; and, once half of what fits is taken, when its caller has not more than
its own share (``fairness``). One request is always let in where none is in flight, so that a mesh that looks slow is
tried again; a few are as long as they fit into their budgets, so that what works in parallel gets to show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from services.ingress.approach import Approach, Approaching
from services.ingress.capacity import Capacity
from services.ingress.config import AdmissionConfig
from services.ingress.fairness import Caller, Shares
from services.ingress.stats import IngressStats, Kind
from shared.clock import Clock
from shared.errors import DeadlineExceededError, OverloadedError, StageUnavailableError

_OVERLOADED = (DeadlineExceededError, OverloadedError, StageUnavailableError)
"""How a request fails that should not have been let in: too late, a full queue, a station that was too late twice."""


class Gate:
    """A bound on what is in flight in this replica.

    Args:
        kind: What is counted.
        in_flight_max: How many may be in flight.
        retry_after_s: What a shed client is told to wait at least, seconds.
        stats: Where it is counted.
    """

    def __init__(self, kind: Kind, in_flight_max: int, retry_after_s: int, stats: IngressStats) -> None:
        self._kind: Kind = kind
        self._stats = stats
        self._max = in_flight_max
        self._retry_after_s = retry_after_s
        self.in_flight = 0

    def check(self) -> None:
        """Refuse early, e.g. before a body is read, without taking a place.

        Raises:
            OverloadedError: every place is taken.
        """
        if self.in_flight >= self._max:
            self._shed(f"{self.in_flight} {self._kind} requests in flight, limit {self._max}", self._max,
                       self.in_flight)  # fmt: skip

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: every place is taken.
        """
        self.check()
        self._step(1)
        try:
            yield
        finally:
            self._step(-1)

    def _step(self, number: int) -> None:
        self.in_flight += number
        self._stats.in_flight(self._kind, self.in_flight)

    def _shed(self, message: str, limit: float, value: float, retry_after_s: float = 0.0) -> NoReturn:
        self._stats.shed(self._kind)
        raise OverloadedError(
            message, limit=limit, value=value, retry_after_s=max(self._retry_after_s, math.ceil(retry_after_s))
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One request at the gate.

    Args:
        num_candidates: Candidates C.
        budget_ms: Its whole budget, milliseconds.
        caller: Who asks.
    """

    num_candidates: int
    budget_ms: float
    caller: Caller


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What was let by before, and is not in flight yet.

    Args:
        num: Requests.
        work: Their work.
    """

    num: int = 0
    work: float = 0.0


_NOBODY_AHEAD = _Ahead()
"""At admission itself: who was let by later comes later."""


class Place:
    """What a request that was let in holds; it says what became of it.

    Args:
        capacity: Where it is counted.
        work: Its work.

    Attributes:
        is_served: It has an answer.
        is_late: Its deadline cut the answer short.
    """

    def __init__(self, capacity: Capacity, work: float) -> None:
        self.is_served = False
        self.is_late = False
        self._capacity = capacity
        self._begun = capacity.begin(work)
        self._resting_since_s: float | None = None
        self._rested_s = 0.0
        self._is_left = False

    def rest(self) -> None:
        """Say that the request waits in vain; nothing once it has left."""
        if self._resting_since_s is None and not self._is_left:
            self._resting_since_s = self._capacity.rest(self._begun)

    def work(self) -> None:
        """Say that it goes on."""
        if self._resting_since_s is not None:
            self._rested_s += self._capacity.go_on(self._begun) - self._resting_since_s
            self._resting_since_s = None

    def leave(self, predicted_share: float) -> None:
        """Count the request out.

        Args:
            predicted_share: Share of its budget that it was expected to take.
        """
        self.work()
        self._is_left = True
        self._capacity.end(self._begun, is_served=self.is_served, rested_s=self._rested_s)
        if self.is_late and not self._rested_s:  # it was a silent station that made it late
            self._capacity.missed(predicted_share)


class RankGate(Gate):
    """Admission of rank requests.

    Args:
        in_flight_max: Bound whatever the measurement says: memory.
        retry_after_s: What a shed client is told to wait at least, seconds.
        config: The rest.
        stats: Where it is counted.
        clock: Time.
    """

    def __init__(
        self, in_flight_max: int, retry_after_s: int, config: AdmissionConfig, stats: IngressStats, clock: Clock
    ) -> None:
        super().__init__("rank", in_flight_max, retry_after_s, stats)
        self.capacity = Capacity(config, clock)
        self._config = config
        self._shares = Shares(config.weights, config.memory_s, config.callers_max, clock)
        self._clock = clock
        self._easiest = _Easiest(config.memory_s, clock)
        self._approaching = Approaching(clock)

    @property
    def load(self) -> float:
        """Work in flight over what a queue that stands may hold: 1 is full, 0 without a measurement.

        What is no queue (``in_flight_min``) is no load, however little was served of late: after a stall the measured
        capacity is that of the stall, and a request that is alone waits for nobody.
        """
        wait_s = self.capacity.wait_s(0.0)
        if wait_s is None or self.num_working < self._config.in_flight_min:
            return 0.0
        usable_s = min(self._easiest.budget_s, self._config.standing_ms_max / 1e3)
        return wait_s / (self.capacity.share * usable_s)

    def counters(self) -> dict[str, int]:
        """Return what is measured: capacity in work a second, load and the share of budgets in percent."""
        return {
            "capacity_per_s": round(self.capacity.rate or 0.0),
            "load_percent": round(100 * self.load),
            "budget_share_percent": round(100 * self.capacity.share),
        }

    @contextmanager
    def approach(self, tenant: str) -> Iterator[Approach]:
        """Refuse like ``check``, or count the request as coming until it is admitted or the block ends.

        Args:
            tenant: Who asks.

        Raises:
            OverloadedError: it would not be answered in time.
        """
        self.check(tenant)
        approach = self._approaching.begin(self._shares.name_of(tenant))
        try:
            yield approach
        finally:
            self._approaching.end(approach)

    def check(self, tenant: str = "") -> None:
        """Refuse what not even the easiest request of late would get past, before a body is read.

        Args:
            tenant: Who asks; what is refused is kept for its next request too.

        Raises:
            OverloadedError: it would not be answered in time.
        """
        easiest = self._easiest.ask()
        each = 1.0 if easiest is None else easiest[0]
        ahead, of_all = self._ahead(each)
        wanted = each * (1 + of_all * self._approaching.of(self._shares.name_of(tenant)))
        self._shares.want(tenant, wanted)
        super().check()
        self._check_start(1.0, ahead)
        if easiest is not None:
            self._check_wait(*easiest, lambda total: self._shares.may_own(tenant, wanted, total), ahead)
            self._check_share(
                tenant or "this caller", *easiest,
                lambda total: self._shares.tenant_has_room(tenant, wanted, total), ahead,
            )  # fmt: skip

    @contextmanager
    def admit(self, ask: Ask, approach: Approach | None = None) -> Iterator[Place]:
        """Hold a place while the block runs.

        Args:
            ask: What is asked.
            approach: As what the request was counted until now.

        Raises:
            OverloadedError: it would not be answered in time, or its caller has its share.
        """
        if approach is not None:
            self._approaching.end(approach)
        work, budget_s = self.capacity.work_of(ask.num_candidates), ask.budget_ms / 1e3
        self._easiest.saw(work, budget_s)
        caller = self._shares.ask(ask.caller, work)
        super().check()
        self._check_start(work)
        predicted_share = self._check_wait(work, budget_s, lambda total: self._shares.owns(caller, work, total))
        self._check_share(
            f"{caller.tenant or 'this caller'} on {caller.surface}", work, budget_s,
            lambda total: self._shares.has_room(caller, work, total),
        )  # fmt: skip
        self._shares.begin(caller, work)
        place = Place(self.capacity, work)
        self._step(1)
        try:
            yield place
        except _OVERLOADED:
            place.is_late = True
            raise
        finally:
            self._step(-1)
            self._shares.end(caller, work)
            place.leave(predicted_share)

    @property
    def num_working(self) -> int:
        """Requests in flight but for those that wait in vain."""
        return self.capacity.num_working

    def _ahead(self, each: float) -> tuple[_Ahead, float]:
        """Return who will be before the next one, this much work each, and what share they are of all on their way."""
        num = len(self._approaching)
        rate = self._rate(self.num_working + num)
        backlog = self._approaching.backlog((rate or 0.0) / each)
        return _Ahead(math.ceil(backlog), backlog * each), backlog / max(num, 1)

    def _rate(self, num: int) -> float | None:
        """Return the measured capacity; where no queue is, the newest answers may say that a stall is over."""
        return self.capacity.newest_rate if num < self._config.in_flight_min else self.capacity.rate

    def _in_queue_s(self, budget_s: float) -> float:
        """Return how much of a budget counts where there is a queue."""
        queue_ms = self._config.standing_ms_max if self.capacity.queue_stands else self._config.wait_ms_max
        return min(budget_s, queue_ms / 1e3)

    def _check_start(self, work: float, ahead: _Ahead = _NOBODY_AHEAD) -> None:
        would_be, limit = self.capacity.in_flight_work + ahead.work + work, self._config.work_start
        if self.capacity.rate is None and would_be > limit and self.num_working + ahead.num:
            self._shed(f"work for {would_be:.1f} requests in flight before any was measured, limit {limit:g}", limit,
                       round(would_be, 1))  # fmt: skip

    def _check_wait(
        self, work: float, budget_s: float, owns: Callable[[float], bool], ahead: _Ahead = _NOBODY_AHEAD
    ) -> float:
        """Return the share of the budget that the request is expected to take.

        A queue that stands is of those who want more than their share: who does not may wait in it as in any other.
        """
        num = self.num_working + ahead.num
        rate = self._rate(num)
        wait_s = self.capacity.wait_s(work + ahead.work, rate)
        if wait_s is None or rate is None:
            return 0.0
        usable_s = budget_s if num < self._config.in_flight_min else self._in_queue_s(budget_s)
        allowed_s = self.capacity.share * usable_s
        if wait_s > allowed_s and num and owns(allowed_s * rate):
            usable_s = min(budget_s, self._config.wait_ms_max / 1e3)
            allowed_s = self.capacity.share * usable_s
        if wait_s > allowed_s and num:
            self._shed(
                f"an answer would take {wait_s * 1e3:.0f} ms, {allowed_s * 1e3:.0f} ms of the budget may go on it",
                round(allowed_s * 1e3), round(wait_s * 1e3), min(wait_s - allowed_s, self._easiest.budget_s),
            )  # fmt: skip
        return wait_s / usable_s

    def _check_share(
        self, who: str, work: float, budget_s: float, has_room: Callable[[float], bool], ahead: _Ahead = _NOBODY_AHEAD
    ) -> None:
        num = self.num_working + ahead.num
        rate = self._rate(num)
        if rate is None:
            return
        would_be = self.capacity.in_flight_work + ahead.work + work
        each = would_be / (num + 1)
        # What is no queue is shared too, and where capacity is large the places in memory are what runs out first.
        in_time = max(self.capacity.share * self._in_queue_s(budget_s) * rate, self._config.in_flight_min * each)
        total = min(in_time, self._max * each)
        is_contended = would_be > self._config.contended_share * total
        if is_contended and num and not has_room(total):
            self._shed(
                f"{who} has its share of the {total:.0f} requests that can be answered in time",
                round(total), round(self.capacity.in_flight_work),
            )  # fmt: skip


class _Easiest:
    """The least work and the largest budget of the requests of the last seconds."""

    def __init__(self, memory_s: float, clock: Clock) -> None:
        self._memory_s = memory_s
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._now = self._before = (math.inf, 0.0)

    @property
    def budget_s(self) -> float:
        """Largest budget, seconds; a second where there was no request."""
        return max(self._now[1], self._before[1]) or 1.0

    def saw(self, work: float, budget_s: float) -> None:
        """Count a request."""
        self._turn()
        self._now = (min(self._now[0], work), max(self._now[1], budget_s))

    def ask(self) -> tuple[float, float] | None:
        """Return work and budget of the easiest request, None where there was none."""
        self._turn()
        work, budget_s = min(self._now[0], self._before[0]), max(self._now[1], self._before[1])
        return None if math.isinf(work) else (work, budget_s)

    def _turn(self) -> None:
        """Forget what is older than one to two memories."""
        if self._clock.monotonic_s() - self._since_s >= self._memory_s:
            self._before, self._now = self._now, (math.inf, 0.0)
            self._since_s = self._clock.monotonic_s()
