"""When a look-up is slow, ask a second replica: after a quantile of what look-ups usually take, within a budget.

The budget is a share of the calls: a station that is slow because it has too much to do gets at most that share more,
so hedges cannot amplify load. The usual time is that of the station's newest calls in this ingress replica.

Source: Dean and Barroso, The Tail at Scale, Communications of the ACM, 2013.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pydantic import Field

from shared.config import Config


class HedgeConfig(Config):
    """Second calls for slow look-ups.

    Args:
        share_max: Most hedges as a share of calls; 0: none.
        quantile: A call that has taken longer than this share of the calls before it is hedged.
        delay_ms_min: Least time before a hedge, milliseconds, however quick calls usually are.
        window_calls: Newest calls of a station that the quantile is of.
        calls_min: Calls of a station before its first hedge.
        burst_max: Hedges that may be saved up while calls are quick.
    """

    share_max: float = Field(0.0, ge=0, le=0.5)
    quantile: float = Field(0.95, ge=0.5, lt=1)
    delay_ms_min: float = Field(1.0, ge=0)
    window_calls: int = Field(512, ge=16, le=65_536)
    calls_min: int = Field(100, ge=1)
    burst_max: int = Field(8, ge=1)


class Hedger:
    """Decides on hedges for one ingress replica.

    Args:
        config: Limits.
        stations: Names of the stations whose calls may be hedged.
    """

    def __init__(self, config: HedgeConfig, stations: Sequence[str]) -> None:
        self._config = config
        self._usual = {name: _Window(config) for name in stations} if config.share_max else {}
        self._budget = 0.0

    def delay_s(self, station: str) -> float | None:
        """Return how long a call may take before it is hedged, seconds; None: it is not hedged."""
        window = self._usual.get(station)
        return None if window is None else window.quantile_s

    def take(self) -> bool:
        """Take one hedge from the budget, if there is one."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True

    def ended(self, station: str, took_s: float) -> None:
        """Note how long a call took from its start to the first answer, its hedge's or its own."""
        if (window := self._usual.get(station)) is None:
            return
        self._budget = min(self._budget + self._config.share_max, float(self._config.burst_max))
        window.add(took_s)


class _Window:
    """The newest times of one station."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque(maxlen=config.window_calls)
        self._renew_in = config.calls_min
        self.quantile_s: float | None = None

    def add(self, took_s: float) -> None:
        self._times_s.append(took_s)
        self._renew_in -= 1
        if self._renew_in <= 0:
            ordered = sorted(self._times_s)
            usual_s = ordered[int(self._config.quantile * len(ordered))]
            self.quantile_s = max(usual_s, self._config.delay_ms_min / 1e3)
            # Sorting costs some 50 us: once in many calls.
            self._renew_in = max(len(ordered) // 16, 1)
