"""What a replica counts and logs about itself: calls in flight, calls by outcome, and things that happened.

Everything counted goes to two places: the metrics that Prometheus scrapes, and plain numbers for ``status``, named like
the metric without its unit, then its labels: ``calls.rank.ok``.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shared.clock import Clock
from shared.errors import RankMeshError
from shared.log import JsonLogger
from shared.metrics import MetricsRegistry

DURATIONS_KEPT = 1_024
"""Calls whose time is remembered, for percentiles of late."""


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
        station: Deployment name, e.g. ``embedding:1``; the metrics are those of ``embedding``.
        replica: Name of the replica.
        clock: Time.
        logger: Where failed calls are logged; default standard error.
        label_values: This deployment's own values of a metric label, e.g. ``{"tier": ("full",)}``.
    """

    def __init__(
        self,
        station: str,
        replica: str,
        clock: Clock,
        logger: JsonLogger | None = None,
        label_values: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.station = station
        self.in_flight = 0
        self.counts: Counter[str] = Counter()
        self.logger = (logger or JsonLogger(clock=clock)).bind(service=station, replica=replica)
        self.metrics = MetricsRegistry(station.partition(":")[0], label_values)
        self._clock = clock
        self._durations: deque[tuple[float, float]] = deque(maxlen=DURATIONS_KEPT)

    @contextmanager
    def call(self, method: str, request_id: str = "") -> Iterator[Timer]:
        """Count one call of ``method`` by its outcome: ok, cancelled, or the code of its error."""
        self._enter(1)
        outcome = "internal"
        timer = Timer(self._clock)
        try:
            yield timer
            outcome = "ok"
        except RankMeshError as error:
            outcome = error.code
            self.logger.warning("call_failed", method=method, request_id=request_id, code=error.code, error=error)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._enter(-1)
            if outcome != "cancelled":
                self._durations.append((self._clock.monotonic_s(), timer.elapsed_ms()))
            self.add("calls_total", method=method, outcome=outcome)

    def add(self, metric: str, number: int = 1, /, **labels: str) -> None:
        """Count something that the metrics know."""
        self.counts[".".join((metric.removesuffix("_total"), *labels.values()))] += number
        self.metrics.count(metric, number, **labels)

    def note(self, what: str, number: int = 1) -> None:
        """Count something that only ``status`` shows."""
        self.counts[what] += number

    def computed(self, method: str, compute_ms: float) -> None:
        """Record how long a call computed, without waiting, milliseconds."""
        self.metrics.observe("compute_ms", compute_ms, method=method)

    def p99_ms(self, window_s: float) -> float | None:
        """Return the 99th percentile of the times of the calls that ended in the last ``window_s``, milliseconds.

        Waiting in the replica counts. None where no call ended.
        """
        since_s = self._clock.monotonic_s() - window_s
        times = sorted(elapsed_ms for ended_s, elapsed_ms in self._durations if ended_s >= since_s)
        return times[-(len(times) // 100) - 1] if times else None

    def counters(self) -> dict[str, int]:
        """Return all counts, and the calls in flight now."""
        return {"in_flight": self.in_flight, **self.counts}

    def _enter(self, step: int) -> None:
        self.in_flight += step
        self.metrics.set("in_flight_calls", self.in_flight)
