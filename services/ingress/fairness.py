"""Who has how much of the work in flight: a caller may use what nobody else wants, and its own share when all want.

What is kept for another caller is half as much again as it has lately wanted at once, and at most its share: a single
request of somebody else costs a busy caller a place or two, not half of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Args:
        tenant: As the client names itself; empty: nobody in particular.
        surface: Where the answer is shown.
    """

    tenant: str
    surface: str


@dataclass(slots=True)
class _Holding:
    work: float
    wanted: float
    seen_s: float


class Shares:
    """Weighted shares among the callers of late.

    Args:
        weights: Tenant or surface -> weight, 1 for those not named; a caller's weight is the product of its two.
        memory_s: Time in which what a caller wanted is forgotten to a third, seconds.
        callers_max: Callers that are told apart; all beyond are one.
        clock: Time.
    """

    def __init__(self, weights: Mapping[str, float], memory_s: float, callers_max: int, clock: Clock) -> None:
        self._weights = weights
        self._memory_s = memory_s
        self._max = callers_max
        self._clock = clock
        self._held: dict[Caller, _Holding] = {}

    def ask(self, caller: Caller, work: float) -> Caller:
        """Note that a caller wants this much more, whether it gets it or not; return as whom it is counted."""
        now_s = self._clock.monotonic_s()
        self._forget(now_s)
        if caller not in self._held and len(self._held) >= self._max:
            caller = _OTHERS
        holding = self._held.setdefault(caller, _Holding(0.0, 0.0, now_s))
        holding.wanted = max(self._wanted(holding, now_s), holding.work + work)
        holding.seen_s = now_s
        return caller

    def begin(self, caller: Caller, work: float) -> None:
        """Count work in; ``caller`` as ``ask`` returned it."""
        self._held[caller].work += work

    def end(self, caller: Caller, work: float) -> None:
        """Count work out."""
        holding = self._held[caller]
        holding.work = max(holding.work - work, 0.0)

    def has_room(self, caller: Caller, work: float, total: float) -> bool:
        """Return whether ``total`` leaves a caller this much more beside what is kept for the others."""
        now_s = self._clock.monotonic_s()
        weights = sum(self._weight(each) for each in self._held)
        kept = sum(
            min(_ROOM_TO_GROW * max(self._wanted(holding, now_s), holding.work), total * self._weight(each) / weights)
            for each, holding in self._held.items()
            if each != caller
        )
        return self._held[caller].work + work <= total - kept

    def _wanted(self, holding: _Holding, now_s: float) -> float:
        return holding.wanted * math.exp((holding.seen_s - now_s) / self._memory_s)

    def _weight(self, caller: Caller) -> float:
        return self._weights.get(caller.tenant, 1.0) * self._weights.get(caller.surface, 1.0)

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - _MEMORIES * self._memory_s
        gone = [caller for caller, holding in self._held.items() if holding.work <= 0 and holding.seen_s < oldest_s]
        for caller in gone:
            del self._held[caller]


_MEMORIES = 3.0
_ROOM_TO_GROW = 1.5
_OTHERS = Caller("others", "others")
