"""A server behind admission, in simulated time."""

from __future__ import annotations

import heapq
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.ingress.admission import Ask, RankGate
from services.ingress.config import AdmissionConfig
from services.ingress.fairness import Caller
from services.ingress.stats import IngressStats
from shared.clock import ManualClock
from shared.errors import OverloadedError

NOBODY = Caller("", "feed")


class HandClock(ManualClock):
    """A clock that a simulation sets, without an event loop."""

    def set(self, time_s: float) -> None:
        self._time_s = time_s


def rank_gate(clock: ManualClock, in_flight_max: int = 1_000, **config: Any) -> RankGate:
    stats = IngressStats(["full"], clock)
    return RankGate(in_flight_max, 1, AdmissionConfig(**config), stats, clock)


def ask(budget_ms: float = 1_000, num_candidates: int = 0, caller: Caller = NOBODY) -> Ask:
    return Ask(num_candidates, budget_ms, caller)


@dataclass
class Outcome:
    """What became of the arrivals of a simulation."""

    in_time: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    shed: list[float] = field(default_factory=list)
    latencies_s: dict[float, float] = field(default_factory=dict)
    of_caller: Counter[str] = field(default_factory=Counter)

    def goodput(self, begin_s: float, end_s: float) -> float:
        return sum(begin_s <= time_s < end_s for time_s in self.in_time) / (end_s - begin_s)


def simulate(
    gate: RankGate,
    clock: HandClock,
    arrivals: list[tuple[float, Ask]],
    service_s: float = 1 / 15,
    num_servers: int = 2,
    *,
    is_rough: bool = False,
) -> Outcome:
    """Serve arrivals in order of arrival on a few servers behind a gate; by default 30 requests a second.

    Each takes ``service_s`` times its work. Work that was let in is done even when it has become too late, which is the
    worst case for goodput. A rough server is as one on busy cores: each time differs, and all are slower and quicker in
    turn; arrivals are looked at before their bodies are read, too.
    """
    rng = np.random.default_rng(0)
    outcome, zero_s = Outcome(), clock.monotonic_s()
    servers = [zero_s] * num_servers
    ends: list[tuple[float, int, float, Ask, Any, ExitStack]] = []

    def finish(until_s: float) -> None:
        while ends and ends[0][0] <= until_s:
            end_s, _, came_s, asked, place, held = heapq.heappop(ends)
            clock.set(end_s)
            is_late = end_s - came_s > asked.budget_ms / 1e3
            place.is_served, place.is_late = not is_late, is_late
            held.close()
            (outcome.late if is_late else outcome.in_time).append(came_s - zero_s)
            outcome.latencies_s[came_s - zero_s] = end_s - came_s
            outcome.of_caller[asked.caller.surface] += not is_late

    for number, (at_s, asked) in enumerate(arrivals):
        finish(zero_s + at_s)
        clock.set(zero_s + at_s)
        held = ExitStack()
        try:
            if is_rough:
                gate.check(asked.caller.tenant)
            place = held.enter_context(gate.admit(asked))
        except OverloadedError:
            outcome.shed.append(at_s)
            continue
        start_s = max(heapq.heappop(servers), zero_s + at_s)
        roughness = rng.lognormal(0.0, 0.3) * (1 + 0.4 * np.sin(4 * at_s)) if is_rough else 1.0
        end_s = start_s + service_s * gate.capacity.work_of(asked.num_candidates) * roughness
        heapq.heappush(servers, end_s)
        heapq.heappush(ends, (end_s, number, zero_s + at_s, asked, place, held))
    finish(float("inf"))
    return outcome


def poisson(rate: float, begin_s: float, end_s: float, seed: int, asked: Ask | None = None) -> list[tuple[float, Ask]]:
    rng = np.random.default_rng(seed)
    times = begin_s + np.cumsum(rng.exponential(1 / rate, int(2 * rate * (end_s - begin_s)) + 20))
    return [(float(time_s), asked or ask()) for time_s in times[times < end_s]]


def fill(gate: RankGate, held: ExitStack, asked: Ask) -> float:
    """Take every place that is given and return the time until all are served, seconds."""
    with suppress(OverloadedError):
        while True:
            held.enter_context(gate.admit(asked))
    return gate.capacity.wait_s(0.0) or 0.0
