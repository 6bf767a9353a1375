"""A replica that falls silent under a steady load, with the limits that a deployment has: who waits, who is refused."""

from __future__ import annotations

import random

import pytest

from cluster.simulation.checks import safety
from cluster.simulation.mesh import Outcome, Report, simulate
from cluster.simulation.network import WireConfig
from cluster.simulation.world import NUM_INGRESS, USERS, Ask, Fault, World
from services.ingress.config import IngressConfig
from shared.errors import OverloadedError

RATE, CALM_S, SILENT_S, END_S = 20.0, 3.0, 4.0, 8.0
SHORT_S = 0.7
"""A silence in which breakers open, and which ends before a call that is left is stopped."""
STATIONS = ("sequence", "embedding:0", "speculative", "ranking:full")
CONFIG = IngressConfig()
OPEN_S = 1.3
"""Until a breaker has opened: what waits for a limit began before."""


def silent_world(station: str, num_replicas: int = 1, seed: int = 1, silent_s: float = SILENT_S) -> World:
    """Return a steady load that the mesh bears easily, half of it with small budgets, and one silence."""
    rng, at_s, asks = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(RATE)) < END_S:
        asks.append(Ask(at_s, rng.randrange(NUM_INGRESS), rng.randrange(USERS), (1, 2, 3), rng.choice((300, 1_000))))
    fault = Fault(CALM_S, "silent", station, 0, silent_s)
    return World(seed, WireConfig(ongoing_max=32), num_replicas, 0.008, tuple(asks), (), (fault,))


def took_s(outcome: Outcome) -> float:
    assert outcome.ended_s is not None
    return outcome.ended_s - outcome.ask.at_s


def between(report: Report, begin_s: float, end_s: float) -> list[Outcome]:
    return [each for each in report.outcomes if begin_s <= each.ask.at_s < end_s]


def refused(report: Report) -> int:
    return sum(isinstance(each.error, OverloadedError) for each in report.outcomes)


def marked(outcomes: list[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.body is not None and each.body["degraded"]]


@pytest.mark.parametrize("station", STATIONS)
def test_while_a_station_is_silent_answers_are_marked_at_once_and_none_is_refused(station: str) -> None:
    report = simulate(silent_world(station), CONFIG)
    assert list(safety(report)) == []
    assert [each.error for each in report.outcomes if each.error is not None] == []
    silent = between(report, CALM_S + OPEN_S, CALM_S + SILENT_S)
    assert len(silent) > 30
    assert marked(silent) == silent
    assert max(took_s(each) for each in silent) < 0.06
    after = between(report, CALM_S + SILENT_S + CONFIG.breaker.open_ms / 1e3 + 0.1, END_S)
    assert len(after) > 5
    assert marked(after) == []


@pytest.mark.parametrize("station", STATIONS)
def test_without_breakers_everybody_would_wait_and_some_be_refused(station: str) -> None:
    breaker = CONFIG.breaker.model_copy(update={"failures": 100_000})
    report = simulate(silent_world(station), CONFIG.model_copy(update={"breaker": breaker}))
    assert refused(report) > 0
    assert max(took_s(each) for each in between(report, CALM_S + OPEN_S, CALM_S + SILENT_S) if each.body) > 0.25


@pytest.mark.parametrize("station", [*STATIONS, "preprocess"])
def test_with_another_replica_few_answers_are_not_whole(station: str) -> None:
    """Calls go to the less busy of two, and a silent replica has calls: few go there, or a user's would all."""
    report = simulate(silent_world(station, num_replicas=2), CONFIG)
    assert list(safety(report)) == []
    assert [each.error for each in report.outcomes if each.error is not None] == []
    assert len(marked(report.outcomes)) <= (CONFIG.breaker.failures + 4) * NUM_INGRESS
    later = between(report, CALM_S + OPEN_S, END_S)
    assert len(marked(later)) <= CONFIG.breaker.failures


@pytest.mark.parametrize("station", ["sequence", "embedding:0", "ranking:full"])
def test_after_a_short_silence_no_answer_is_marked(station: str) -> None:
    """As of a replica without a core in a burst: the calls that opened its breakers are answered and close them."""
    num_left = 0
    for seed in range(1, 5):
        report = simulate(silent_world(station, seed=seed, silent_s=SHORT_S), CONFIG)
        assert list(safety(report)) == []
        num_left += sum(call.left_s is not None for call in report.calls)
        after = between(report, CALM_S + SHORT_S + 0.05, END_S)
        assert len(after) > 50
        assert marked(after) == []
    assert num_left > 0
