"""Configuration of a deployment that scales: the block ``autoscaling`` of its ``replicas``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shared.config import Config


class ScalingConfig(Config):
    """How the number of replicas of one deployment follows its load; ``docs/autoscaling.md`` has the arithmetic.

    Args:
        min_replicas: Fewest replicas. 0 is for foundation workers alone: nobody waits for them.
        max_replicas: Most replicas.
        busy_target: Share of its time that a replica should compute. 1 less this is the room for what arrives while
            the next replica starts, and for the unevenness of arrivals.
        busy_low: A replica is taken away only if those that stay would be less busy than this, at the highest demand of
            ``down_after_s``. The gap to ``busy_target`` is the hysteresis.
        start_s: From asking for a replica until it serves at full speed: process, load of the weights, golden request,
            warm-up. Demand is foreseen over this time.
        window_s: Demand is the mean over this time.
        trend_s: The rise of demand is measured over this time.
        drain_s: Work that waits is to be worked off in this time: by how many more replicas is the price of a queue.
        queue_s_max: Waiting work, in seconds that each replica needs for it, at which replicas are added at once,
            whatever the mean over ``window_s`` says.
        p99_ms_max: Bound of the 99th percentile of a call's time in the replica; None: not watched. Above it, replicas
            that are at least half as busy as they should be get one more.
        down_after_s: Quiet time before a replica is taken away.
        down_every_s: Time between two that are taken away.
        zero_after_s: Time without any demand before the last replica is taken away, where ``min_replicas`` is 0.
        signal: What is busy: ``compute``, the station's compute thread or, in a station without one, its process;
            ``sm``: the multiprocessors of the replica's GPU, by NVML (Hopper or newer).
    """

    min_replicas: int = Field(1, ge=0, le=1_000)
    max_replicas: int = Field(4, ge=1, le=1_000)
    busy_target: float = Field(0.7, gt=0, lt=1)
    busy_low: float = Field(0.55, gt=0, lt=1)
    start_s: float = Field(15.0, gt=0, le=3_600)
    window_s: float = Field(10.0, gt=0, le=600)
    trend_s: float = Field(120.0, gt=0, le=7_200)
    drain_s: float = Field(10.0, gt=0, le=600)
    queue_s_max: float = Field(0.4, gt=0, le=60)
    p99_ms_max: float | None = Field(None, gt=0)
    down_after_s: float = Field(300.0, gt=0, le=86_400)
    down_every_s: float = Field(60.0, gt=0, le=86_400)
    zero_after_s: float = Field(600.0, gt=0, le=86_400)
    signal: Literal["compute", "sm"] = "compute"

    @model_validator(mode="after")
    def _parts_agree(self) -> ScalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas must be at most max_replicas {self.max_replicas}, is {self.min_replicas}")
        if not self.busy_low < self.busy_target:
            raise ValueError(f"busy_low must be below busy_target {self.busy_target}, is {self.busy_low}")
        for name in ("down_after_s", "trend_s"):
            if getattr(self, name) < self.window_s:
                raise ValueError(f"{name} must be at least window_s {self.window_s:g}, is {getattr(self, name):g}")
        if self.zero_after_s < self.start_s:
            raise ValueError(
                f"zero_after_s must be at least start_s {self.start_s:g}, or a replica could go before it has come; "
                f"is {self.zero_after_s:g}"
            )
        return self

    @property
    def silence_s(self) -> float:
        """Longest time from the end of all demand until ``min_replicas`` run, from ``max_replicas``."""
        steps = self.max_replicas - max(self.min_replicas, 1)
        down_s = self.window_s + self.down_after_s + max(steps - 1, 0) * self.down_every_s if steps else 0.0
        return down_s if self.min_replicas else max(down_s, self.zero_after_s)
