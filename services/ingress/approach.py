"""Rank requests between their headers and their admission: let by, not yet counted as work in flight.

A body, its parsing and what Serve does take a while, in which a burst gets all of its requests past a look that knows
only of what was admitted; each is then refused after that work, behind all the others. So who is let by is counted
until admission knows it. Only for a moment: a client that is slow with its body holds no place. And only as far as they
come faster than they are served: of a steady stream on a long way many are always coming, and none has to wait.
"""

from __future__ import annotations

from collections import Counter

from shared.clock import Clock

SECONDS_MAX = 0.1
"""How long a request counts. On the way from its headers to admission it spends some milliseconds, in a burst tens."""


class Approach:
    """One request on its way to admission.

    Args:
        tenant: Whose it is.
        at_s: Since when, monotonic seconds.
    """

    __slots__ = ("at_s", "tenant")

    def __init__(self, tenant: str, at_s: float) -> None:
        self.tenant = tenant
        self.at_s = at_s


class Approaching:
    """All of them.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[Approach, None] = {}  # the oldest first
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of those that count."""
        oldest_s = self._clock.monotonic_s() - SECONDS_MAX
        while self._all and (first := next(iter(self._all))).at_s <= oldest_s:
            self.end(first)
        return len(self._all)

    def of(self, tenant: str) -> int:
        """Return how many are a tenant's."""
        return self._by_tenant[tenant]

    def backlog(self, per_s: float) -> float:
        """Return how many are more than what gets done between the arrival of the first of them and of the next one.

        They come to admission in the order and at the distances in which their headers came: who is one of many on a
        long way, but at a rate that the mesh keeps up with, finds no queue of those before it.

        Args:
            per_s: How many get done in a second.
        """
        num, most, now_s = len(self), 0.0, self._clock.monotonic_s()
        for approach in self._all:
            most = max(most, num - per_s * (now_s - approach.at_s))
            num -= 1
        return most

    def begin(self, tenant: str) -> Approach:
        """Count one."""
        approach = Approach(tenant, self._clock.monotonic_s())
        self._all[approach] = None
        self._by_tenant[tenant] += 1
        return approach

    def end(self, approach: Approach) -> None:
        """Count it no more: it was admitted or refused, it is gone, or took too long. Again: nothing."""
        if approach in self._all:
            del self._all[approach]
            self._by_tenant[approach.tenant] -= 1
            if not self._by_tenant[approach.tenant]:
                del self._by_tenant[approach.tenant]
