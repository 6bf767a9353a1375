"""The policy as Ray Serve's controller calls it: at every turn of its loop, on its event loop, so it must be quick.

What the source of Ray 2.60 says and this file relies on:

* A class is made once for each deployment and keeps its memory; a deployment that is configured anew gets a new one.
* A policy that raises stops every change of every application. So this one does not: what it cannot work out is logged
  and leaves the number of replicas as it is.
* Serve applies its own factors and delays to what a policy says. They are set to do nothing; the bounds are the same.
* Without replicas, Serve itself asks for one when a call waits at a handle, before it asks the policy.
"""

from __future__ import annotations

import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.scaling.config import ScalingConfig
from cluster.scaling.load import BUSY_SHARE, P99_MS, WAITING_S
from cluster.scaling.policy import Observation, ScalingPolicy
from shared.clock import SystemClock
from shared.log import JsonLogger

REPORT_PERIOD_S = 0.5
"""How often replicas and handles report; Serve's default is 10 s."""

_POLICY = "cluster.scaling.serve_policy:ServePolicy"


class ServePolicy:
    """One deployment's policy.

    Args:
        station: Name of the deployment, for the log.
        **settings: Fields of ``ScalingConfig``, as JSON has them.
    """

    def __init__(self, station: str, **settings: Any) -> None:
        self._config = ScalingConfig.model_validate(settings)
        self._policy = ScalingPolicy(self._config)
        self._logger = JsonLogger(clock=SystemClock()).bind(service="autoscaling", station=station)
        self._looked_s = float("-inf")
        self._replicas: int | None = None
        self._failed = False

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas; the memory is this object's own."""
        try:
            return self._decide(ctx), {}
        except Exception as error:  # noqa: BLE001 - anything that leaves here stops the whole controller
            if not self._failed:
                self._logger.warning("scaling_failed", error=error)
            self._failed = True
            return ctx.target_num_replicas, {}

    def _decide(self, ctx: Any) -> int:
        is_raised = self._replicas is not None and ctx.target_num_replicas != self._replicas
        if 0 <= ctx.current_time - self._looked_s < REPORT_PERIOD_S and not is_raised:
            return int(ctx.target_num_replicas)  # there is nothing new to see
        if ctx.current_time < self._looked_s:
            self._policy = ScalingPolicy(self._config)  # the wall clock was put back: what was seen lies ahead
        self._looked_s = ctx.current_time
        seen = observe(ctx, self._config.p99_ms_max is not None)
        decision = self._policy.decide(seen)
        if decision.replicas != seen.target:
            self._logger.info(
                "scaled",
                reason=decision.reason,
                replicas=decision.replicas,
                before=seen.target,
                running=seen.running,
                busy_percent=None if seen.busy_share is None else round(100 * seen.busy_share),
                waiting_ms=round(1e3 * seen.waiting_s),
            )
        self._replicas = decision.replicas
        return decision.replicas


def observe(ctx: Any, with_latency: bool) -> Observation:
    """Make an observation of Serve's context.

    Args:
        ctx: ``ray.serve.config.AutoscalingContext``.
        with_latency: Whether the percentile is wanted.
    """
    running = ctx.current_num_replicas
    if running == 0:
        return Observation(ctx.current_time, 0, ctx.target_num_replicas, None, is_wanted=ctx.total_num_requests > 0)
    figures = ctx.raw_metrics or {}
    shares = _latest(figures, BUSY_SHARE)
    waiting = _latest(figures, WAITING_S)
    slowest = _latest(figures, P99_MS) if with_latency else []
    return Observation(
        time_s=ctx.current_time,
        running=running,
        target=ctx.target_num_replicas,
        busy_share=sum(shares) / len(shares) if shares else None,
        waiting_s=sum(waiting),
        p99_ms=max(slowest, default=None),
        is_wanted=False,
    )


def _latest(figures: Any, name: str) -> list[float]:
    """Return the newest value that each replica told."""
    return [float(series[-1].value) for series in figures.get(name, {}).values() if series]


def serve_autoscaling(station: str, replicas: int, config: ScalingConfig) -> AutoscalingConfig:
    """Return Serve's configuration of a deployment that scales.

    Args:
        station: Name of the deployment.
        replicas: How many it starts with.
        config: How it scales.
    """
    settings = {"station": station, **config.model_dump(mode="json")}
    policy: Any = AutoscalingPolicy  # its constructor is not typed
    options: dict[str, Any] = {
        "min_replicas": config.min_replicas,
        "initial_replicas": replicas,
        "max_replicas": config.max_replicas,
        "policy": policy(policy_function=_POLICY, policy_kwargs=settings),
        # Delays and factors are the policy's own.
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        # Figures are taken every fifth of this, and the policy reads the newest.
        "look_back_period_s": 5 * REPORT_PERIOD_S,
        "metrics_interval_s": REPORT_PERIOD_S,
    }
    with warnings.catch_warnings():
        # The variables that are to replace metrics_interval_s are read by nothing in 2.60.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(**options)
