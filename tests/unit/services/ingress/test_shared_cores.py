"""Admission of two ingress replicas before stations that share two cores: what a mesh on one machine is like.

Unlike a server with a queue, cores that are shared slow every request down that is in flight, so letting in too much
makes all of them late at once; and a refusal takes processor time from the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.ingress.admission import Ask, Place, RankGate
from services.ingress.config import IngressConfig
from services.ingress.fairness import Caller
from services.ingress.stats import IngressStats
from shared.clock import ManualClock
from shared.errors import OverloadedError

CONFIG = IngressConfig()
CORES = 2.0
FULL_S, LIGHT_S, REFUSAL_S = 0.075, 0.050, 0.002
"""Processor time of a request by tier, and of a refusal at balancer, ingress and client: as measured on two cores."""

FLOOR_S = 0.03
"""What a request waits for that is no processor."""

BUDGET_S = 1.0
CAPACITY = CORES / FULL_S
NUM_INGRESS = 2
STATION_S, STATION_PART = 0.5, 0.6
"""Limit of a station that is through after three fifths of a request: then its input is given up, which is marked."""

ROUNDING_S = 1e-9


class HandClock(ManualClock):
    """A clock that the model sets, without an event loop."""

    def set(self, time_s: float) -> None:
        self._time_s = time_s


@dataclass
class Running:
    """A request that was let in."""

    left_s: float
    came_s: float
    until_s: float
    gate: int
    place: Place
    held: ExitStack


@dataclass
class Outcome:
    """What became of the requests: ``whole``, ``marked``, ``late``, ``shed``."""

    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> int:
        return self.counts["whole"] + self.counts["marked"]


class Machine:
    """Shares its cores evenly among the requests in flight, refusals first."""

    def __init__(self, seed: int, delay_s: Callable[[float], float] = lambda time_s: 0.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._delay_s = delay_s
        self._clock = HandClock()
        self._zero_s = self._clock.monotonic_s()
        stats = IngressStats(["full"], self._clock)
        self._gates = [RankGate(128, 1, CONFIG.admission, stats, self._clock) for _ in range(NUM_INGRESS)]
        self._running: list[Running] = []
        self._now_s = self._refusing_s = 0.0
        self.outcome = Outcome()

    def serve(self, arrivals_s: list[float]) -> Outcome:
        for at_s in arrivals_s:
            self._run(at_s)
            self._arrive()
        self._run(np.inf)
        return self.outcome

    def _arrive(self) -> None:
        in_flight = [(sum(each.gate == index for each in self._running), self._rng.random()) for index in (0, 1)]
        chosen = in_flight.index(min(in_flight))  # as the balancer does: the one with the fewest
        gate, held = self._gates[chosen], ExitStack()
        try:
            place = held.enter_context(gate.admit(Ask(500, BUDGET_S * 1e3, Caller("", "feed"))))
        except OverloadedError:
            self.outcome.counts["shed"] += 1
            self._refusing_s += REFUSAL_S
            return
        is_light = gate.load > CONFIG.light_above_load or gate.in_flight > CONFIG.light_above_in_flight
        work_s = (LIGHT_S if is_light else FULL_S) * self._rng.lognormal(-0.045, 0.3)
        until_s = self._now_s + FLOOR_S + self._delay_s(self._now_s)
        self._running.append(Running(work_s, self._now_s, until_s, chosen, place, held))

    def _run(self, until_s: float) -> None:
        while self._running and self._now_s < until_s:
            busy = [each for each in self._running if each.left_s > 0]
            rate = min(1.0, CORES / len(busy)) if busy else 0.0
            first_s = self._now_s + self._refusing_s / CORES
            ends_s = [first_s + each.left_s / rate if each.left_s > 0 else each.until_s for each in self._running]
            cuts_s = [each.came_s + BUDGET_S for each in self._running]
            next_s = max(min(until_s, *ends_s, *cuts_s), self._now_s)
            done_s = max(next_s - first_s, 0.0) * rate
            for each in busy:
                each.left_s = each.left_s - done_s if each.left_s - done_s > ROUNDING_S else 0.0
            self._pass(next_s)
            self._end()
        if np.isfinite(until_s):
            self._pass(until_s)

    def _pass(self, until_s: float) -> None:
        self._refusing_s = max(self._refusing_s - (until_s - self._now_s) * CORES, 0.0)
        self._now_s = until_s
        self._clock.set(self._zero_s + until_s)

    def _end(self) -> None:
        for each in list(self._running):
            is_done = each.left_s == 0 and each.until_s <= self._now_s + ROUNDING_S
            took_s = self._now_s - each.came_s
            if not is_done and took_s < BUDGET_S - ROUNDING_S:
                continue
            self._running.remove(each)
            each.place.is_served, each.place.is_late = is_done, not is_done
            each.held.close()
            self.outcome.counts["whole" if is_done and took_s * STATION_PART <= STATION_S else
                                "marked" if is_done else "late"] += 1  # fmt: skip
            self.outcome.latencies_s.append(took_s)


def poisson(rate: float, duration_s: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return sorted(float(time_s) for time_s in rng.uniform(0.0, duration_s, rng.poisson(rate * duration_s)))


def outcome_of(ratio: float) -> Outcome:
    """Return what came of three worlds together."""
    total = Outcome()
    for seed in range(3):
        one = Machine(seed).serve(poisson(ratio * CAPACITY, 10.0, seed))
        total.counts += one.counts
        total.latencies_s += one.latencies_s
    return total


@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_what_is_let_in_is_answered_in_time_and_whole(ratio: float) -> None:
    outcome = outcome_of(ratio)
    let_in = outcome.goodput + outcome.counts["late"]
    assert outcome.counts["late"] <= 0.005 * let_in
    assert outcome.counts["marked"] <= 0.02 * let_in


def test_four_times_the_load_costs_no_goodput() -> None:
    assert outcome_of(4.0).goodput >= 0.9 * max(outcome_of(ratio).goodput for ratio in (1.0, 2.0))


def test_what_the_cores_can_do_is_not_shed() -> None:
    outcome = outcome_of(0.9)
    assert outcome.counts["shed"] <= 0.01 * outcome.goodput
    assert outcome.counts["late"] == outcome.counts["marked"] == 0


def test_a_station_that_hangs_sheds_little_of_what_the_cores_could_do() -> None:
    """Each request waits for the station's limit: many are in flight, and no core is busy."""
    machine = Machine(1, lambda time_s: STATION_S if 5.0 < time_s < 9.0 else 0.0)
    outcome = machine.serve(poisson(20.0, 15.0, 1))
    assert outcome.counts["shed"] <= 0.05 * outcome.goodput
    assert outcome.counts["late"] == 0
