"""Admission: so many requests at once and no more; the rest are told when to come back, before any work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.ingress.stats import IngressStats, Kind
from shared.errors import OverloadedError


class Gate:
    """A bound on what is in flight in this replica.

    Args:
        kind: What is counted.
        in_flight_max: How many may be in flight.
        retry_after_s: What a shed client is told to wait, seconds.
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
            self._stats.shed(self._kind)
            raise OverloadedError(
                f"{self.in_flight} {self._kind} requests in flight, limit {self._max}",
                limit=self._max, value=self.in_flight, retry_after_s=self._retry_after_s,
            )  # fmt: skip

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
