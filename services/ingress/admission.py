"""Admission: so many requests at once and no more; the rest are told when to come back, before any work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import OverloadedError


class Gate:
    """A bound on what is in flight in this replica.

    Args:
        what: What is counted, for messages, e.g. ``rank requests``.
        in_flight_max: How many may be in flight.
        retry_after_s: What a shed client is told to wait, seconds.
    """

    def __init__(self, what: str, in_flight_max: int, retry_after_s: int) -> None:
        self._what = what
        self._max = in_flight_max
        self._retry_after_s = retry_after_s
        self.in_flight = 0
        self.num_admitted = 0
        self.num_shed = 0

    def check(self) -> None:
        """Refuse early, e.g. before a body is read, without taking a place.

        Raises:
            OverloadedError: every place is taken.
        """
        if self.in_flight >= self._max:
            self.num_shed += 1
            raise OverloadedError(
                f"{self.in_flight} {self._what} in flight, limit {self._max}",
                limit=self._max, value=self.in_flight, retry_after_s=self._retry_after_s,
            )  # fmt: skip

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: every place is taken.
        """
        self.check()
        self.in_flight += 1
        self.num_admitted += 1
        try:
            yield
        finally:
            self.in_flight -= 1
