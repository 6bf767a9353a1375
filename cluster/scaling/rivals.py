"""Ray Serve's own policy in simulated time: its functions as installed, fed as its controller feeds them.

Ray 2.60 scales on ongoing requests: their mean over ``look_back_period_s`` and all replicas, over the target. What it
decides must stand for a delay before it is carried out; the function that sees to it takes the time as an argument.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.scaling.replay import Look, Scaler


def ray_default(min_replicas: int, max_replicas: int, target_ongoing: float | None = None) -> Scaler:
    """Return Ray Serve's default policy as a scaler.

    Args:
        min_replicas: Fewest replicas.
        max_replicas: Most replicas.
        target_ongoing: Ongoing requests that a replica should have; None: Serve's default. Everything else is at
            Serve's defaults: 30 s before it scales up, 600 s before it scales down, a mean over 30 s.
    """
    bounds: dict[str, Any] = {"min_replicas": min_replicas, "max_replicas": max_replicas}
    if target_ongoing is not None:
        bounds["target_ongoing_requests"] = target_ongoing
    config = AutoscalingConfig(**bounds)
    ongoing: deque[tuple[float, int]] = deque()
    state: dict[str, Any] = {}

    def scale(look: Look) -> int:
        ongoing.append((look.time_s, look.num_ongoing))
        while ongoing[0][0] <= look.time_s - config.look_back_period_s:
            ongoing.popleft()
        total = sum(count for _, count in ongoing) / len(ongoing)
        desired, _ = replica_queue_length_autoscaling_policy(_context(look, total, config, state))
        if look.running == 0 and desired > 0:
            return int(min(max(desired, min_replicas), max_replicas))
        whole = _apply_scaling_factors(desired, look.running, config)
        decided, _ = _apply_delay_logic(max(0, whole), look.target, config, state, look.time_s)
        return min(max(decided, min_replicas), max_replicas)

    return scale


def _context(look: Look, total: float, config: AutoscalingConfig, state: dict[str, Any]) -> AutoscalingContext:
    unknown: Any = None
    return AutoscalingContext(
        deployment_id=unknown,
        deployment_name="replay",
        app_name=None,
        current_num_replicas=look.running,
        target_num_replicas=look.target,
        running_replicas=[],
        total_num_requests=total,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=look.time_s,
        config=config,
    )
