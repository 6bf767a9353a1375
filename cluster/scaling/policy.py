"""The scaling policy: observations of one deployment in, how many replicas it should have out.

Source of the rule: replicas follow the utilisation of the device, with queue and latency as guards, as the operators of
large ranking models describe it (``docs/autoscaling.md``); the arithmetic is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cluster.scaling.config import ScalingConfig
from cluster.scaling.demand import Mean, Peak, Trend

Reason: TypeAlias = Literal["bounds", "busy", "trend", "queue", "latency", "wanted", "quiet", "silence", "hold"]

_ROUNDING: Final = 1e-9
"""A demand that n replicas meet exactly must not ask for n + 1."""

_APART_S: Final = 1e-3
"""Looks that are closer than this are one look: growth over no time is no rate."""

BURST_S: Final = 2.0
"""Over this time the demand is measured that a queue is answered for: shorter, and single looks are mostly chance."""

IDLE_SHARE: Final = 0.01
"""A replica that is busy for less does nothing: what is left is its own upkeep."""

_LATENCY_BUSY_SHARE: Final = 0.5
"""Where replicas are less busy than this part of the target, calls are slow for other reasons than want of replicas."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a deployment.

    Args:
        time_s: When, seconds of a clock that only goes forward.
        running: Replicas that serve.
        target: Replicas asked for, those that start included.
        busy_share: Mean share of its time that a serving replica computed since the look before, 0 to 1; None: not
            known.
        waiting_s: Work that waits in all replicas and before them, seconds of one replica's computing.
        p99_ms: 99th percentile of a call's time, milliseconds; None: not known.
        is_wanted: Whether anybody calls now; what wakes a deployment without replicas.
    """

    time_s: float
    running: int
    target: int
    busy_share: float | None
    waiting_s: float = 0.0
    p99_ms: float | None = None
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do.

    Args:
        replicas: How many there should be.
        reason: Why; ``hold`` when nothing changes.
    """

    replicas: int
    reason: Reason


class ScalingPolicy:
    """Follows one deployment.

    Up at once, by what is needed; down after a quiet time, one at a time. See ``docs/autoscaling.md``.

    Args:
        config: What the deployment file says.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._mean = Mean(config.window_s)
        self._burst = Mean(min(config.window_s, BURST_S))
        self._trend = Trend(config.trend_s)
        self._peak = Peak(config.down_after_s)
        self._before: Observation | None = None
        self._asked: int | None = None
        self._raised_s = -math.inf
        self._lowered_s = -math.inf
        self._wanted_s: float | None = None
        self._too_slow: tuple[int, float] | None = None

    def decide(self, seen: Observation) -> Decision:
        """Return how many replicas there should be from now on."""
        config = self._config
        if self._asked is not None and seen.target > self._asked:
            self._raised_s = seen.time_s  # somebody else asked: Serve itself does, for the first of none
        if self._wanted_s is None or self._is_in_demand(seen):
            self._wanted_s = seen.time_s
        decision = self._within_bounds(seen, self._choose(seen))
        if decision.replicas > seen.target:
            self._raised_s = seen.time_s
        elif decision.replicas < seen.target:
            self._lowered_s = seen.time_s
        self._asked, self._before = decision.replicas, seen
        assert config.min_replicas <= decision.replicas <= config.max_replicas
        return decision

    def _choose(self, seen: Observation) -> Decision:
        hold = Decision(seen.target, "hold")
        if seen.running == 0:
            return self._from_none(seen)
        if seen.busy_share is None:
            return hold  # what is not known is no reason for anything
        arriving = self._arriving(seen)
        demand, burst = self._mean.add(seen.time_s, arriving), self._burst.add(seen.time_s, arriving)
        self._trend.add(seen.time_s, demand)
        self._peak.add(seen.time_s, demand)
        up = self._up(seen, arriving, demand, burst)
        if up.replicas > seen.target:
            if up.reason == "latency":
                self._too_slow = seen.target, demand
            return up
        return self._down(seen) or hold

    # --- up -------------------------------------------------------------------------------------------------------

    def _up(self, seen: Observation, arriving: float, demand: float, burst: float) -> Decision:
        """Return the largest number that any of the rules asks for."""
        config = self._config
        foreseen = demand + self._trend.rise_per_s() * config.start_s
        rules: list[tuple[int, Reason]] = [
            (self._replicas_for(demand), "busy"),
            (self._replicas_for(foreseen), "trend"),
            (self._for_queue(seen, arriving, burst), "queue"),
            (self._for_latency(seen), "latency"),
        ]
        return Decision(*max(rules, key=lambda rule: rule[0]))

    def _for_queue(self, seen: Observation, arriving: float, burst: float) -> int:
        """Return what meets the demand of these seconds and works the queue off within ``drain_s``.

        One more at once where the queue grows: by the time a mean can say by how much, the burst has cost a second.
        """
        if seen.waiting_s / seen.running <= self._config.queue_s_max:
            return 0
        grows = 1 if arriving > seen.running else 0
        return max(
            math.ceil(burst + seen.waiting_s / self._config.drain_s - _ROUNDING),
            min(seen.running + grows, seen.target + 1),
        )

    def _for_latency(self, seen: Observation) -> int:
        config = self._config
        if config.p99_ms_max is None or seen.p99_ms is None or seen.p99_ms <= config.p99_ms_max:
            return 0
        has_news = seen.running >= seen.target and seen.time_s - self._raised_s >= config.window_s
        is_busy = (seen.busy_share or 0.0) >= _LATENCY_BUSY_SHARE * config.busy_target
        return seen.target + 1 if has_news and is_busy else 0

    def _replicas_for(self, demand: float) -> int:
        return math.ceil(demand / self._config.busy_target - _ROUNDING)

    def _arriving(self, seen: Observation) -> float:
        """Return the work that arrived since the look before: what was computed, and by how much the queue grew."""
        computed = seen.running * min(max(seen.busy_share or 0.0, 0.0), 1.0)
        if self._before is None or self._before.running == 0:
            return computed
        elapsed_s = seen.time_s - self._before.time_s
        if elapsed_s < _APART_S:
            return computed
        return max(computed + (seen.waiting_s - self._before.waiting_s) / elapsed_s, 0.0)

    # --- down -----------------------------------------------------------------------------------------------------

    def _down(self, seen: Observation) -> Decision | None:
        config = self._config
        floor = max(config.min_replicas, 1)
        if seen.running < seen.target and seen.time_s - self._raised_s < config.start_s:
            return None  # what was asked for has not had the time to come
        if seen.target > floor:
            highest = self._peak.highest(seen.time_s)
            is_due = seen.time_s - self._lowered_s >= config.down_every_s
            if highest is not None and is_due and self._would_do(seen.target - 1, highest):
                return Decision(seen.target - 1, "quiet")
        elif config.min_replicas == 0 and self._is_silent(seen):
            return Decision(0, "silence")
        return None

    def _would_do(self, replicas: int, demand: float) -> bool:
        """Return whether so many are enough for a demand, and were not too slow for one like it."""
        if demand > self._config.busy_low * replicas + _ROUNDING:
            return False
        if self._too_slow is None or replicas > self._too_slow[0]:
            return True
        return demand <= self._too_slow[1] * self._config.busy_low / self._config.busy_target

    # --- none -----------------------------------------------------------------------------------------------------

    def _from_none(self, seen: Observation) -> Decision:
        if seen.target == 0:
            return Decision(1, "wanted") if seen.is_wanted else Decision(0, "hold")
        if self._config.min_replicas == 0 and seen.target == 1 and self._is_silent(seen):
            return Decision(0, "silence")
        return Decision(seen.target, "hold")

    def _is_in_demand(self, seen: Observation) -> bool:
        return seen.is_wanted or seen.waiting_s > 0 or (seen.busy_share or 0.0) > IDLE_SHARE

    def _is_silent(self, seen: Observation) -> bool:
        assert self._wanted_s is not None
        return seen.time_s - max(self._wanted_s, self._raised_s) >= self._config.zero_after_s

    def _within_bounds(self, seen: Observation, decision: Decision) -> Decision:
        bounded = min(max(decision.replicas, self._config.min_replicas), self._config.max_replicas)
        if bounded == decision.replicas:
            return decision
        if bounded == seen.target:
            return Decision(bounded, "hold")
        return Decision(bounded, "bounds" if decision.reason == "hold" else decision.reason)
