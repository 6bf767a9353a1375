"""What a replica counts and logs about itself: calls in flight, calls by outcome, and things that happened."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shared.clock import Clock
from shared.errors import RankMeshError
from shared.log import JsonLogger


class Timer:
    """Measures compute time on a station's clock from its creation."""

    __slots__ = ("_clock", "_start_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.monotonic_s()

    def elapsed_ms(self) -> float:
        """Return milliseconds since the start."""
        return (self._clock.monotonic_s() - self._start_s) * 1e3


class Meter:
    """Counts for one replica.

    Args:
        station: Deployment name.
        replica: Name of the replica.
        clock: Time.
        logger: Where failed calls are logged; default standard error.
    """

    def __init__(self, station: str, replica: str, clock: Clock, logger: JsonLogger | None = None) -> None:
        self.station = station
        self.in_flight = 0
        self.counts: Counter[str] = Counter()
        self.logger = (logger or JsonLogger(clock=clock)).bind(service=station, replica=replica)
        self._clock = clock

    @contextmanager
    def call(self, method: str, request_id: str = "") -> Iterator[Timer]:
        """Count one call of ``method`` by its outcome: ok, cancelled, or the code of its error."""
        self.in_flight += 1
        outcome = "internal"
        try:
            yield Timer(self._clock)
            outcome = "ok"
        except RankMeshError as error:
            outcome = error.code
            self.logger.warning("call_failed", method=method, request_id=request_id, code=error.code, error=error)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.in_flight -= 1
            self.counts[f"{method}_{outcome}"] += 1

    def add(self, what: str, number: int = 1) -> None:
        """Count something that happened."""
        self.counts[what] += number

    def counters(self) -> dict[str, int]:
        """Return all counts, and the calls in flight now."""
        return {"in_flight": self.in_flight, **self.counts}
