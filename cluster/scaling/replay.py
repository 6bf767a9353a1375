"""Arrivals against a policy, in simulated time: every request on its own, replicas that take time to start.

One replica works on one request at a time; a request goes to the replica that is free first, and waits in one queue
until then. A request that cannot be answered before its deadline is shed when it comes, as admission does. A replica
costs from the moment it is asked for until it has stopped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.scaling.config import ScalingConfig
from cluster.scaling.policy import Observation, ScalingPolicy

SERVICE_SPREAD: Final = 0.3
"""Standard deviation of the logarithm of a request's time in a replica."""


@dataclass(frozen=True, slots=True)
class Station:
    """What is simulated.

    Args:
        service_s: Mean time of a request in a replica, seconds.
        deadline_s: A request is a miss when it is not answered within this time.
        start_s: From asking for a replica until it serves, seconds.
        look_s: Time between two looks of the policy, seconds.
    """

    service_s: float = 0.12
    deadline_s: float = 1.0
    start_s: float = 60.0
    look_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to see at the end of a stretch of time.

    Args:
        time_s: When.
        running: Replicas that serve.
        target: Replicas asked for.
        busy_share: Mean share of the stretch that a serving replica computed.
        waiting_s: Computing that waits, seconds.
        num_ongoing: Requests that wait or are computed.
        num_arrived: Requests that came during the stretch.
    """

    time_s: float
    running: int
    target: int
    busy_share: float
    waiting_s: float
    num_ongoing: int
    num_arrived: int


class Scaler(Protocol):
    """Decides how many replicas there are."""

    def __call__(self, look: Look) -> int:
        """Return how many there should be."""
        ...


def static(replicas: int) -> Scaler:
    """Return a scaler that never scales."""
    return lambda look: replicas


def by_policy(config: ScalingConfig) -> Scaler:
    """Return the mesh's own policy as a scaler."""
    policy = ScalingPolicy(config)

    def scale(look: Look) -> int:
        share = look.busy_share if look.running else None
        wanted = look.num_arrived > 0 or look.num_ongoing > 0
        seen = Observation(
            look.time_s, look.running, look.target, share, look.waiting_s, is_wanted=wanted and look.running == 0
        )
        return policy.decide(seen).replicas

    return scale


_Held: TypeAlias = tuple[float, float, float]
"""When a request is begun, is ended, and came."""


@dataclass(slots=True)
class Outcome:
    """What a replay came to.

    Args:
        num_requests: Requests that came.
        num_misses: Requests that were shed, for they would have been late.
        replica_s: What was paid for, seconds of a replica.
        num_up: Decisions for more replicas.
        num_down: Decisions for fewer.
        wait_max_s: Longest wait of a request that was answered.
        times_s: Times of the points below.
        targets: Replicas asked for, at each look.
        misses: Misses since the look before.
    """

    num_requests: int = 0
    num_misses: int = 0
    replica_s: float = 0.0
    num_up: int = 0
    num_down: int = 0
    wait_max_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)

    def add(self, times_s: npt.NDArray[np.float64], accepted: list[_Held], paid_s: float) -> None:
        """Count a stretch of time."""
        self.num_requests += len(times_s)
        self.num_misses += len(times_s) - len(accepted)
        self.replica_s += paid_s
        self.wait_max_s = max(self.wait_max_s, max((began_s - time_s for began_s, _, time_s in accepted), default=0.0))

    @property
    def replica_hours(self) -> float:
        """What was paid for, hours of a replica."""
        return self.replica_s / 3_600

    @property
    def miss_share(self) -> float:
        """Share of the requests that were missed."""
        return self.num_misses / max(self.num_requests, 1)


class Replicas:
    """The replicas of one station: those that serve, by when they are free, and those that start.

    Args:
        count: That serve at the beginning.
        start_s: Time that one takes to start.
    """

    def __init__(self, count: int, start_s: float) -> None:
        self.free_s = [0.0] * count
        self._starting: list[float] = []
        self._start_s = start_s

    @property
    def target(self) -> int:
        """Those that serve and those that start."""
        return len(self.free_s) + len(self._starting)

    def begin(self, now_s: float) -> None:
        """Let those that have started serve."""
        while self._starting and self._starting[0] <= now_s:
            heapq.heappush(self.free_s, heapq.heappop(self._starting))

    def resize(self, now_s: float, count: int) -> float:
        """Start or stop replicas.

        Those that start are stopped first, then those that are free first; one that computes ends its work.

        Returns:
            Seconds that stopped replicas go on working: they are paid for.
        """
        for _ in range(count - self.target):
            heapq.heappush(self._starting, now_s + self._start_s)
        tail_s = 0.0
        for _ in range(self.target - count):
            if self._starting:
                self._starting.remove(max(self._starting))
                heapq.heapify(self._starting)
            else:
                tail_s += max(heapq.heappop(self.free_s) - now_s, 0.0)
        return tail_s

    def work_s(self, now_s: float) -> float:
        """Return the work that they hold, seconds of one replica."""
        return sum(free_s - now_s for free_s in self.free_s if free_s > now_s)


def replay(
    arrivals_s: Iterator[npt.NDArray[np.float64]], station: Station, scaler: Scaler, first: int, seed: int
) -> Outcome:
    """Run a station through its arrivals.

    Args:
        arrivals_s: Arrival times of each stretch of ``look_s``, ascending, seconds since the beginning.
        station: What is simulated.
        scaler: Decides after each stretch.
        first: Replicas at the beginning, which serve.
        seed: Of the times in a replica.
    """
    rng = np.random.default_rng(seed)
    replicas, outcome = Replicas(first, station.start_s), Outcome()
    held: list[_Held] = []
    for number, times in enumerate(arrivals_s, start=1):
        end_s = number * station.look_s
        begin_s = end_s - station.look_s
        replicas.begin(begin_s)
        before_s, target, running = replicas.work_s(begin_s), replicas.target, len(replicas.free_s)
        accepted = _serve(replicas.free_s, times, _services(rng, len(times), station), station.deadline_s)
        num_misses = len(times) - len(accepted)
        computed_s = before_s + sum(ended_s - began_s for began_s, ended_s, _ in accepted) - replicas.work_s(end_s)
        held = [request for request in (*held, *accepted) if request[1] > end_s]
        outcome.add(times, accepted, target * station.look_s)
        look = Look(
            time_s=end_s,
            running=running,
            target=target,
            busy_share=min(max(computed_s / (running * station.look_s), 0.0), 1.0) if running else 0.0,
            waiting_s=sum(ended_s - began_s for began_s, ended_s, _ in held if began_s > end_s),
            num_ongoing=len(held),
            num_arrived=len(times),
        )
        decided = scaler(look)
        outcome.num_up += decided > target
        outcome.num_down += decided < target
        outcome.replica_s += replicas.resize(end_s, decided)
        outcome.times_s.append(end_s)
        outcome.targets.append(decided)
        outcome.misses.append(num_misses)
    return outcome


def _services(rng: np.random.Generator, count: int, station: Station) -> list[float]:
    location = math.log(station.service_s) - SERVICE_SPREAD**2 / 2
    services: list[float] = rng.lognormal(location, SERVICE_SPREAD, count).tolist()
    return services


def _serve(
    free_s: list[float], times: npt.NDArray[np.float64], services: list[float], deadline_s: float
) -> list[_Held]:
    """Give requests to the replicas; return those that were taken."""
    accepted: list[_Held] = []
    if not free_s:
        return accepted
    for time_s, service_s in zip(times.tolist(), services, strict=True):
        began_s = max(time_s, free_s[0])
        ended_s = began_s + service_s
        if ended_s - time_s <= deadline_s:
            heapq.heapreplace(free_s, ended_s)
            accepted.append((began_s, ended_s, time_s))
    return accepted
