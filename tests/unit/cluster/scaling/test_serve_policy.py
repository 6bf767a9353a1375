"""The binding: what Serve's controller tells, and what it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from cluster.app import build
from cluster.config import MeshConfig
from cluster.scaling.config import ScalingConfig
from cluster.scaling.serve_policy import ServePolicy, observe, serve_autoscaling
from cluster.stations import Place
from shared.userlog import StoreConfig

CONFIG = ScalingConfig(min_replicas=0, max_replicas=6, start_s=5, window_s=2, down_after_s=10, zero_after_s=20)
SERVE = serve_autoscaling("foundation", 1, CONFIG)


def context(
    now_s: float, running: int, target: int, figures: dict[str, list[float]] | None = None, ongoing: float = 0.0
) -> AutoscalingContext:
    """Return what the controller would; the figures of each replica, newest after an old one."""
    raw = {
        name: {
            index: [TimeStampedValue(now_s - 1, 99.0), TimeStampedValue(now_s, value)] for index, value in enumerate(v)
        }
        for name, v in (figures or {}).items()
    }
    unknown: Any = None
    return AutoscalingContext(
        deployment_id=unknown, deployment_name="foundation", app_name="rankmesh", current_num_replicas=running,
        target_num_replicas=target, running_replicas=[], total_num_requests=ongoing, total_queued_requests=0.0,
        aggregated_metrics=unknown, raw_metrics=lambda: raw, capacity_adjusted_min_replicas=0,  # type: ignore[arg-type,return-value]
        capacity_adjusted_max_replicas=6, policy_state={}, last_scale_up_time=None, last_scale_down_time=None,
        current_time=now_s, config=SERVE,
    )  # fmt: skip


def wrapped() -> Any:
    """Return the policy as the controller holds it: through pickle, inside of Serve's own delays and bounds."""
    return _apply_autoscaling_config(_resolve_policy_callable(SERVE.policy))


def test_figures_of_replicas_become_an_observation() -> None:
    seen = observe(
        context(5.0, 3, 4, {"busy_share": [0.5, 0.7], "waiting_s": [1.0, 0.5], "p99_ms": [30.0, 90.0]}), True
    )
    assert (seen.running, seen.target, seen.waiting_s, seen.p99_ms) == (3, 4, 1.5, 90.0)
    assert seen.busy_share == pytest.approx(0.6)  # the third has not told anything yet
    assert observe(context(5.0, 3, 3), True).busy_share is None
    assert observe(context(5.0, 0, 0, ongoing=1.0), True).is_wanted


def test_decisions_go_through_serve_unchanged() -> None:
    policy = wrapped()
    assert policy(context(0.0, 1, 1, {"busy_share": [0.3]}))[0] == 1
    assert policy(context(0.2, 1, 1, {"busy_share": [1.0]}))[0] == 1  # nothing is new so soon
    assert policy(context(10.0, 2, 2, {"busy_share": [1.0, 1.0]}))[0] == 3
    assert policy(context(11.0, 2, 3, {"busy_share": [1.0, 1.0]}))[0] == 3


def test_none_to_one_to_none() -> None:
    policy = wrapped()
    assert policy(context(0.0, 0, 0))[0] == 0
    assert policy(context(1.0, 0, 0, ongoing=0.1))[0] == 1  # by Serve itself
    assert policy(context(2.0, 0, 1))[0] == 1
    assert policy(context(6.0, 1, 1, {"busy_share": [0.5]}))[0] == 1
    assert policy(context(25.0, 1, 1, {"busy_share": [0.0]}))[0] == 1
    assert policy(context(26.5, 1, 1, {"busy_share": [0.0]}))[0] == 0


def test_a_wall_clock_that_is_put_back_does_not_stop_it() -> None:
    policy = wrapped()
    assert policy(context(5_000.0, 1, 1, {"busy_share": [0.3]}))[0] == 1
    assert policy(context(1_000.0, 1, 1, {"busy_share": [1.0]}))[0] == 2
    assert policy(context(1_015.0, 1, 1, {"busy_share": [0.0]}))[0] == 1


def test_it_never_raises(capsys: pytest.CaptureFixture[str]) -> None:
    policy = ServePolicy("foundation", **CONFIG.model_dump(mode="json"))
    broken = context(0.0, 1, 2, {"busy_share": [0.5]})
    broken.current_time = None
    assert [policy(broken)[0], policy(broken)[0]] == [2, 2]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["station"]) for line in lines] == [("scaling_failed", "foundation")]


def test_a_change_is_logged_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    policy = ServePolicy("ranking:full", **CONFIG.model_dump(mode="json"))
    policy(context(0.0, 1, 1, {"busy_share": [1.0]}))
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["reason"], line["before"], line["replicas"]) == ("scaled", "busy", 1, 2)


def test_the_settings_of_a_file_reach_serve() -> None:
    scaling = {"min_replicas": 0, "max_replicas": 3, "busy_target": 0.6}
    config = MeshConfig.model_validate({"foundation": {"replicas": {"replicas": 0, "autoscaling": scaling}}})
    bound: Any = build(Place(config, "v1", "/weights", StoreConfig(), "/plans", "/search"))
    handles = bound._bound_deployment.init_args[1]
    found = handles["foundation"]._bound_deployment._deployment_config.autoscaling_config
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (0, 0, 3)
    assert found.policy.policy_kwargs["busy_target"] == 0.6
    assert (found.upscale_delay_s, found.downscale_delay_s, found.metrics_interval_s) == (0.0, 0.0, 0.5)
    assert handles["preprocess"]._bound_deployment._deployment_config.autoscaling_config is None
