"""Who has how much of the work in flight: a caller may use what nobody else wants, and its own share when all want."""

from __future__ import annotations

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
    seen_s: float


class Shares:
    """Weighted shares among the callers of late.

    Args:
        weights: Tenant or surface -> weight, 1 for those not named; a caller's weight is the product of its two.
        memory_s: How long a caller counts after its last request, seconds: its share is kept for it.
        callers_max: Callers that are told apart; all beyond are one.
        clock: Time.
    """

    def __init__(self, weights: Mapping[str, float], memory_s: float, callers_max: int, clock: Clock) -> None:
        self._weights = weights
        self._memory_s = memory_s
        self._max = callers_max
        self._clock = clock
        self._held: dict[Caller, _Holding] = {}

    def begin(self, caller: Caller, work: float) -> Caller:
        """Count work in and return the caller as which it is counted."""
        self._forget()
        if caller not in self._held and len(self._held) >= self._max:
            caller = _OTHERS
        holding = self._held.setdefault(caller, _Holding(0.0, 0.0))
        holding.work += work
        holding.seen_s = self._clock.monotonic_s()
        return caller

    def end(self, caller: Caller, work: float) -> None:
        """Count work out; ``caller`` as ``begin`` returned it."""
        holding = self._held[caller]
        holding.work = max(holding.work - work, 0.0)

    def seen(self, caller: Caller) -> None:
        """Note that a caller wants something, also when it gets nothing: its share is kept for it."""
        self.end(self.begin(caller, 0.0), 0.0)

    def has_room(self, caller: Caller, work: float, total: float) -> bool:
        """Return whether this much more work stays within the caller's share of ``total``."""
        self._forget()
        holding = self._held.get(caller)
        weights = sum(self._weight(each) for each in self._held)
        if holding is None:
            weights += self._weight(caller)
        held = 0.0 if holding is None else holding.work
        return held + work <= total * self._weight(caller) / weights

    def _weight(self, caller: Caller) -> float:
        return self._weights.get(caller.tenant, 1.0) * self._weights.get(caller.surface, 1.0)

    def _forget(self) -> None:
        oldest_s = self._clock.monotonic_s() - self._memory_s
        gone = [caller for caller, holding in self._held.items() if holding.work <= 0 and holding.seen_s < oldest_s]
        for caller in gone:
            del self._held[caller]


_OTHERS = Caller("others", "others")
