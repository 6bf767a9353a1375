"""The policy alone: what it sees is made by hand or by a queue in simulated time, never by a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scaling.config import ScalingConfig
from cluster.scaling.policy import Decision, Observation, ScalingPolicy
from cluster.scaling.replay import Look, Outcome, Station, by_policy, replay

QUICK = ScalingConfig(min_replicas=1, max_replicas=8, start_s=5, down_after_s=60, down_every_s=20, zero_after_s=30)
STATION = Station(service_s=0.05, deadline_s=1.0, start_s=5.0, look_s=0.5)


def arrivals(
    rate: Callable[[float], float], duration_s: float, look_s: float, seed: int
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the arrivals of each look: Poisson, at the rate of its beginning."""
    rng = np.random.default_rng(seed)
    for number in range(int(duration_s / look_s)):
        begin_s = number * look_s
        count = rng.poisson(rate(begin_s) * look_s)
        yield np.sort(rng.uniform(begin_s, begin_s + look_s, count))


def run(rate: Callable[[float], float], duration_s: float, config: ScalingConfig, first: int, seed: int = 0) -> Outcome:
    times = arrivals(rate, duration_s, STATION.look_s, seed)
    return replay(times, STATION, by_policy(config), first, seed)


def steady(
    policy: ScalingPolicy, share: float, running: int, seconds: int, start_s: float = 0.0, p99_ms: float | None = None
) -> Decision:
    """Look once a second at replicas of one busy share; return the last decision."""
    decision = Decision(running, "hold")
    for second in range(seconds):
        decision = policy.decide(Observation(start_s + second, running, running, share, p99_ms=p99_ms))
    return decision


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_steady_load_at_a_boundary_scales_at_most_twice_in_ten_minutes(replicas: int, seed: int) -> None:
    per_replica = QUICK.busy_target / STATION.service_s
    outcome = run(lambda _: replicas * per_replica, 600, QUICK, replicas, seed)
    assert outcome.num_up + outcome.num_down <= 2
    assert outcome.num_misses == 0


@pytest.mark.parametrize("times", [1.3, 1.6, 2.0, 2.5])
def test_a_burst_is_answered_before_the_queue_costs_a_second(times: float) -> None:
    """So many times what two replicas can do, from one moment to the next."""
    policy = by_policy(QUICK)
    costs: list[float] = []

    def scaler(look: Look) -> int:
        decided = policy(look)
        if decided > look.target and look.time_s > 60:
            costs.append(look.waiting_s / look.running)
        return decided

    rate = 2 / STATION.service_s
    patient = Station(STATION.service_s, 1e9, STATION.start_s, STATION.look_s)
    outcome = replay(
        arrivals(lambda time_s: 0.5 * rate if time_s < 60 else times * rate, 120, 0.5, 0), patient, scaler, 2, 0
    )
    assert costs[0] < 1.0
    assert max(outcome.targets) >= 2 * times
    at_s = next(time_s for time_s, target in zip(outcome.times_s, outcome.targets, strict=True) if target > 2)
    assert at_s - 60 <= 1.0 / (times - 1) + 0.5


def test_silence_brings_the_minimum_back_in_the_configured_time() -> None:
    outcome = run(lambda time_s: 80.0 if time_s < 100 else 0.0, 100 + QUICK.silence_s + 1, QUICK, 4)
    targets = dict(zip(outcome.times_s, outcome.targets, strict=True))
    assert targets[100.0] > 4
    assert targets[100.0 + QUICK.down_after_s] >= 4  # not before the quiet time
    assert outcome.targets[-1] == QUICK.min_replicas
    assert outcome.num_misses == 0


def test_none_to_some_to_none() -> None:
    config = QUICK.model_copy(update={"min_replicas": 0, "down_after_s": 20.0, "down_every_s": 5.0})
    outcome = run(lambda time_s: 60.0 if 10 <= time_s < 70 else 0.0, 70 + config.silence_s + 1, config, 0)
    targets = dict(zip(outcome.times_s, outcome.targets, strict=True))
    assert targets[10.0] == 0
    assert targets[11.0] == 1
    assert max(outcome.targets) >= 4
    assert outcome.targets[-1] == 0


def test_the_last_replica_stays_while_anybody_calls_now_and_then() -> None:
    config = QUICK.model_copy(update={"min_replicas": 0})
    policy = ScalingPolicy(config)
    for second in range(300):
        share = 0.05 if second % 25 == 0 else 0.0
        assert policy.decide(Observation(second, 1, 1, share)).replicas == 1


def test_a_replica_that_somebody_else_asked_for_is_given_time_to_start() -> None:
    """Serve starts the first of none itself; the call that it was for may have given up since."""
    policy = ScalingPolicy(QUICK.model_copy(update={"min_replicas": 0}))
    assert policy.decide(Observation(0, 0, 0, None)).replicas == 0
    for time_s in range(100, 130):
        assert policy.decide(Observation(time_s, 0, 1, None)) == Decision(1, "hold")
    assert policy.decide(Observation(130, 0, 1, None)) == Decision(0, "silence")


def test_replicas_that_start_are_not_asked_for_again() -> None:
    policy = ScalingPolicy(QUICK)
    decision = policy.decide(Observation(0, 2, 2, 1.0))
    assert decision == Decision(3, "busy")
    assert [policy.decide(Observation(time_s, 2, 3, 1.0)).replicas for time_s in range(1, 5)] == [3] * 4


def test_a_rise_is_answered_before_it_arrives() -> None:
    config = ScalingConfig(max_replicas=20, start_s=60, trend_s=60, window_s=5)
    policy = ScalingPolicy(config)
    first = None
    for second in range(600):
        share = 0.2 + 0.001 * second
        decision = policy.decide(Observation(second, 10, 10, share))
        if decision.replicas > 10:
            first = second, decision.reason
            break
    assert first is not None
    second, reason = first
    assert reason == "trend"
    assert second == pytest.approx(500 - config.start_s, abs=20)  # at 500 s ten replicas are 70% busy


def test_slow_calls_get_one_replica_more_and_keep_it() -> None:
    config = QUICK.model_copy(update={"p99_ms_max": 100.0})
    policy = ScalingPolicy(config)
    assert steady(policy, 0.5, 2, 20, p99_ms=90.0) == Decision(2, "hold")
    assert policy.decide(Observation(20, 2, 2, 0.5, p99_ms=150.0)) == Decision(3, "latency")
    # Now it is quick, and demand would fit into two by the busy share alone: those were too slow.
    assert steady(policy, 0.33, 3, 300, start_s=21, p99_ms=50.0) == Decision(3, "hold")
    calm = [policy.decide(Observation(321 + second, 3, 3, 0.1, p99_ms=50.0)) for second in range(90)]
    assert Decision(2, "quiet") in calm


def test_slow_calls_of_idle_replicas_are_not_for_want_of_replicas() -> None:
    policy = ScalingPolicy(QUICK.model_copy(update={"p99_ms_max": 100.0}))
    assert steady(policy, 0.2, 2, 30, p99_ms=500.0) == Decision(2, "hold")


def test_what_is_not_known_changes_nothing() -> None:
    policy = ScalingPolicy(QUICK)
    for second in range(1_000):
        assert policy.decide(Observation(second, 3, 3, None)) == Decision(3, "hold")


def test_a_target_outside_of_the_bounds_is_brought_back() -> None:
    policy = ScalingPolicy(QUICK)
    assert policy.decide(Observation(0, 12, 12, 0.5)) == Decision(8, "bounds")
    assert policy.decide(Observation(1, 0, 0, None)) == Decision(1, "bounds")


looks = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),
        st.integers(0, 12),
        st.integers(0, 12),
        st.one_of(st.none(), st.floats(-1.0, 3.0)),
        st.floats(0.0, 1e6),
        st.one_of(st.none(), st.floats(0.0, 1e6)),
        st.booleans(),
    ),
    max_size=60,
)


def test_looks_at_one_moment_give_no_rate() -> None:
    policy = ScalingPolicy(QUICK)
    assert policy.decide(Observation(0.0, 2, 2, 0.5)) == Decision(2, "hold")
    assert policy.decide(Observation(5e-324, 2, 2, 0.5, waiting_s=1e6)).replicas <= QUICK.max_replicas


@settings(max_examples=60, deadline=None)
@given(looks=looks, least=st.integers(0, 3), more=st.integers(0, 6), bound=st.one_of(st.none(), st.floats(1.0, 1e4)))
def test_bounds_hold_whatever_is_seen(
    looks: list[tuple[float, int, int, float | None, float, float | None, bool]],
    least: int,
    more: int,
    bound: float | None,
) -> None:
    most = max(least + more, 1)
    policy = ScalingPolicy(ScalingConfig(min_replicas=least, max_replicas=most, p99_ms_max=bound))
    now_s = 0.0
    for step_s, running, target, share, waiting_s, p99_ms, is_wanted in looks:
        now_s += step_s
        decision = policy.decide(Observation(now_s, running, target, share, waiting_s, p99_ms, is_wanted))
        assert least <= decision.replicas <= most
        assert decision.replicas >= min(target - 1, most)  # at most a step at a time down


@settings(max_examples=15, deadline=None)
@given(demand=st.floats(0.0, 9.0), first=st.integers(1, 8), slow_ms=st.floats(0.0, 400.0))
def test_constant_load_settles(demand: float, first: int, slow_ms: float) -> None:
    """Replicas that come at once and are as busy as the demand makes them: the number moves one way, then stays."""
    policy = ScalingPolicy(QUICK.model_copy(update={"p99_ms_max": 200.0}))
    target, path = first, [first]
    for second in range(1_200):
        share = min(demand / target, 1.0)
        p99_ms = slow_ms * share
        target = policy.decide(Observation(second, target, target, share, p99_ms=p99_ms)).replicas
        if target != path[-1]:
            path.append(target)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(path, path[1:], path[2:], strict=False))
    assert turns <= 1
    assert target * 1.0 >= min(demand, 8) - 1e-6


def test_a_bound_does_not_hide_why() -> None:
    policy = ScalingPolicy(QUICK.model_copy(update={"max_replicas": 2}))
    assert policy.decide(Observation(0, 1, 1, 1.0, waiting_s=30.0)) == Decision(2, "queue")
    assert policy.decide(Observation(1, 2, 2, 1.0, waiting_s=30.0)) == Decision(2, "hold")
