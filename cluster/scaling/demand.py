"""What a deployment's demand was of late: its mean, its highest, and how it rises.

Demand is work that arrives, in seconds of one replica's computing a second: 2.5 keep two and a half replicas busy.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

NUM_BUCKETS: Final = 12
"""Parts of the time over which a rise is measured; each is one point of the line."""

SIGMAS: Final = 4.0
"""A rise counts when it is this many standard errors above 0. Student's t: chance makes one steady stretch in 800 look
so with all twelve points, one in 120 with the first six."""

SAMPLES_MAX: Final = 1_024
"""Samples of a window that are kept; of more, the oldest go."""


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    value: float


class Mean:
    """Mean of the values of the last ``window_s``, each weighted by the time for which it stood."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)

    def add(self, time_s: float, value: float) -> float:
        """Take a value that describes the time since the one before; return the mean."""
        self._samples.append(_Sample(time_s, value))
        while len(self._samples) > 2 and self._samples[1].time_s <= time_s - self._window_s:
            self._samples.popleft()
        total = weight = 0.0
        earlier_s = None
        for sample in self._samples:
            if earlier_s is not None:
                share_s = sample.time_s - max(earlier_s, time_s - self._window_s)
                total += sample.value * share_s
                weight += share_s
            earlier_s = sample.time_s
        return total / weight if weight > 0 else value


class Peak:
    """Highest value of the last ``window_s``."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[_Sample] = deque()  # times rise, values fall: the first is the highest
        self._since_s: float | None = None

    def add(self, time_s: float, value: float) -> None:
        """Take a value."""
        if self._since_s is None:
            self._since_s = time_s
        while self._falling and self._falling[-1].value <= value:
            self._falling.pop()
        self._falling.append(_Sample(time_s, value))
        while self._falling[0].time_s < time_s - self._window_s:
            self._falling.popleft()

    def highest(self, time_s: float) -> float | None:
        """Return it; None while less than the window has been seen."""
        if self._since_s is None or time_s - self._since_s < self._window_s:
            return None
        return self._falling[0].value


class Trend:
    """How fast demand rises: least squares through the means of equal parts of the last ``window_s``.

    A rise that chance explains is none (``SIGMAS``).
    """

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / NUM_BUCKETS
        self._means: deque[float] = deque(maxlen=NUM_BUCKETS)
        self._start_s: float | None = None
        self._total, self._count = 0.0, 0

    def add(self, time_s: float, value: float) -> None:
        """Take a value."""
        if self._start_s is None:
            self._start_s = time_s
        if (skipped := int((time_s - self._start_s) / self._bucket_s)) > 0:
            if self._count:
                self._means.append(self._total / self._count)
            if skipped > NUM_BUCKETS:  # nothing was heard for so long that the line has no beginning
                self._means.clear()
            self._start_s += skipped * self._bucket_s
            self._total, self._count = 0.0, 0
        self._total += value
        self._count += 1

    def rise_per_s(self) -> float:
        """Return how much demand grows in a second, 0 where it does not, or not clearly."""
        count = len(self._means)
        if count < NUM_BUCKETS // 2:
            return 0.0
        centre = (count - 1) / 2
        mean = sum(self._means) / count
        spread = sum((place - centre) ** 2 for place in range(count))
        slope = sum((place - centre) * value for place, value in enumerate(self._means)) / spread
        left = sum((value - mean - slope * (place - centre)) ** 2 for place, value in enumerate(self._means))
        error = math.sqrt(left / (count - 2) / spread)
        return slope / self._bucket_s if slope > SIGMAS * error else 0.0
