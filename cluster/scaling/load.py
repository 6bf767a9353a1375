"""What a replica tells about its load: the share of its time that it computed since it was asked last, and what waits.

A station with a compute thread is as busy as that thread. One without computes on its event loop, which is one thread
too: it is as busy as its process, by processor time. Both can be told from 0 to 1, and reach 1 before calls pile up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from services.worker import WorkerLoad
from shared.clock import Clock, processor_s

BUSY_SHARE: Final = "busy_share"
WAITING_S: Final = "waiting_s"
P99_MS: Final = "p99_ms"

P99_WINDOW_S: Final = 10.0


class Activity(Protocol):
    """Tells how busy a device was."""

    def share(self) -> float | None:
        """Return the share of its time since the last call, 0 to 1; None: not known."""
        ...


class LoadReporter:
    """Measures one replica.

    Args:
        service: The station's service.
        clock: Time.
        activity: The replica's GPU; None: what the replica itself computes counts.
        processor: Processor seconds of this process.
    """

    def __init__(
        self,
        service: Any,
        clock: Clock,
        activity: Activity | None = None,
        processor: Callable[[], float] = processor_s,
    ) -> None:
        self._meter = getattr(service, "meter", None)
        self._worker: Callable[[], WorkerLoad] | None = getattr(service, "load", None)
        self._clock = clock
        self._activity = activity
        self._processor = processor
        self._asked_s = clock.monotonic_s()
        self._busy_s = self._total_busy_s()
        self._call_s = 0.0

    def report(self) -> dict[str, float]:
        """Return the figures since the last report; what is not known is left out."""
        now_s, busy_s = self._clock.monotonic_s(), self._total_busy_s()
        elapsed_s = now_s - self._asked_s
        if elapsed_s <= 0:
            return {}
        computed = min((busy_s - self._busy_s) / elapsed_s, 1.0)
        self._asked_s, self._busy_s = now_s, busy_s
        share = computed if self._activity is None else self._activity.share()
        figures = {} if share is None else {BUSY_SHARE: share}
        if self._worker is not None:
            figures[WAITING_S] = self._waiting_s(self._worker())
        if self._meter is not None and (p99_ms := self._meter.p99_ms(P99_WINDOW_S)) is not None:
            figures[P99_MS] = p99_ms
        return figures

    def _total_busy_s(self) -> float:
        return self._processor() if self._worker is None else self._worker().busy_s

    def _waiting_s(self, load: WorkerLoad) -> float:
        """Return how long the thread will work on what waits, at the mean time of a piece so far."""
        if load.num_ended:
            self._call_s = load.busy_s / load.num_ended
        return load.num_waiting * self._call_s
