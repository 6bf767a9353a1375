"""Admission: fixed bounds, measured capacity against a simulated server, and what a client is told."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

from services.ingress.admission import Gate
from services.ingress.config import IngressConfig
from services.ingress.stats import IngressStats
from shared.clock import ManualClock
from shared.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RankMeshError,
    StageUnavailableError,
)
from shared.schema.api import RankRequest
from tests.helpers.admission import HandClock, ask, fill, poisson, rank_gate, simulate
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG


def test_the_gate_holds_its_limit_and_says_when_to_come_back() -> None:
    gate = Gate("rank", 2, 3, IngressStats(["full"], ManualClock()))
    with gate.enter(), gate.enter():
        with pytest.raises(OverloadedError) as caught, gate.enter():
            pass
        assert caught.value.context == {"limit": 2, "value": 2, "retry_after_s": 3}
    with gate.enter():
        pass
    assert gate.in_flight == 0


def test_a_place_is_given_back_when_the_work_fails() -> None:
    gate = rank_gate(ManualClock())
    with pytest.raises(ZeroDivisionError), gate.admit(ask()):
        raise ZeroDivisionError
    assert gate.in_flight == 0
    assert gate.capacity.in_flight_work == 0


@pytest.mark.parametrize(("count", "is_admitted"), [(1, True), (2, True), (3, False)])
def test_before_anything_is_measured_a_few_are_let_in(count: int, is_admitted: bool) -> None:
    gate = rank_gate(ManualClock(), work_start=2)
    with ExitStack() as held:
        for _ in range(count - 1):
            held.enter_context(gate.admit(ask()))
        if is_admitted:
            held.enter_context(gate.admit(ask()))
        else:
            with pytest.raises(OverloadedError, match="before any was measured, limit 2"):
                gate.check()
            with pytest.raises(OverloadedError):
                held.enter_context(gate.admit(ask()))


def test_the_bound_on_memory_holds_whatever_is_measured() -> None:
    gate = rank_gate(ManualClock(), in_flight_max=1)
    with gate.admit(ask()), pytest.raises(OverloadedError, match="1 rank requests in flight, limit 1"):
        gate.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
def test_overload_costs_no_goodput_and_makes_nobody_late(ratio: float, seed: int) -> None:
    clock = HandClock()
    outcome = simulate(rank_gate(clock), clock, poisson(30 * ratio, 0, 40, seed))
    assert outcome.late == []
    offered = len(outcome.in_time) + len(outcome.shed)
    assert outcome.goodput(5, 40) >= 0.9 * min(30, offered / 40)
    if ratio == 0.5:
        assert outcome.shed == []


def test_after_a_burst_it_is_as_before() -> None:
    clock = HandClock()
    arrivals = poisson(15, 0, 10, 1) + poisson(240, 10, 15, 2) + poisson(15, 15, 25, 3)
    outcome = simulate(rank_gate(clock), clock, arrivals)
    assert outcome.late == []
    assert [at_s for at_s in outcome.shed if at_s < 10 or at_s > 16] == []
    after = [latency_s for came_s, latency_s in outcome.latencies_s.items() if came_s > 17]
    before = [latency_s for came_s, latency_s in outcome.latencies_s.items() if came_s < 10]
    assert np.quantile(after, 0.99) <= 1.5 * np.quantile(before, 0.99)


def test_a_mesh_that_became_slower_is_noticed() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    assert gate.capacity.rate == pytest.approx(30, rel=0.2)
    slower = simulate(gate, clock, poisson(60, 0, 30, 2), service_s=3 / 15)
    assert gate.capacity.rate == pytest.approx(10, rel=0.25)
    assert [came_s for came_s in slower.late if came_s > 5] == []
    assert slower.goodput(10, 30) >= 0.9 * 10


def test_a_mesh_that_became_faster_is_noticed() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1), service_s=3 / 15)
    faster = simulate(gate, clock, poisson(60, 0, 20, 2))
    assert faster.goodput(5, 20) >= 0.9 * 30


def test_a_stall_of_a_second_sheds_nothing_at_half_load() -> None:
    """A replica that dies holds requests up until its calls are retried: 20 a second over two ingress replicas."""
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(10, 0, 10, 1), num_servers=1)
    with ExitStack() as held:
        for at_s, asked in [(step / 10, ask()) for step in range(9)]:
            clock.set(clock.monotonic_s() + 0.1)
            assert at_s < 1
            held.enter_context(gate.admit(asked))
    clock.set(clock.monotonic_s() + 0.1)
    with gate.admit(ask()):
        pass


def test_heavier_requests_and_tighter_budgets_are_shed_first() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with ExitStack() as held:
        for _ in range(15):
            held.enter_context(gate.admit(ask()))
        with pytest.raises(OverloadedError, match="may go on it"):
            held.enter_context(gate.admit(ask(budget_ms=400)))
        with pytest.raises(OverloadedError):
            held.enter_context(gate.admit(ask(num_candidates=20_000)))
        held.enter_context(gate.admit(ask()))


def test_retry_after_follows_from_what_is_in_flight() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with ExitStack() as held:
        for _ in range(20):
            held.enter_context(gate.admit(ask(budget_ms=5_000)))
        with pytest.raises(OverloadedError) as caught:
            held.enter_context(gate.admit(ask(budget_ms=1_000, num_candidates=150_000)))
    work, rate = 20 + 101, gate.capacity.rate or 0.0
    assert caught.value.context["retry_after_s"] == np.ceil(work / rate - 0.8)


def test_nobody_is_told_to_wait_longer_than_what_is_in_flight_can_last() -> None:
    """A stall makes a request look like five seconds of work, but all that is in flight ends with its budget."""
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(500, 0, 5, 1), service_s=1 / 500)
    heavy = ask(budget_ms=500, num_candidates=2_000)
    simulate(gate, clock, [(0.6 * number, heavy) for number in range(20)], service_s=10.0, num_servers=100)
    told: list[float] = []
    with ExitStack() as held:
        for _ in range(20):
            try:
                held.enter_context(gate.admit(heavy))
            except OverloadedError as error:
                told.append(float(error.context["retry_after_s"] or 0))
    assert (gate.capacity.rate or 0.0) < 1
    assert told
    assert max(told) == 1


def test_what_nobody_would_pass_is_refused_before_its_body_is_read() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1, ask(budget_ms=800)))
    with ExitStack() as held:
        with suppress(OverloadedError):
            while True:
                held.enter_context(gate.admit(ask(budget_ms=800)))
        with pytest.raises(OverloadedError):
            gate.check()
        held.enter_context(gate.admit(ask()))
        gate.check()  # such a request might come again


def test_a_long_budget_is_no_longer_queue_than_the_stations_wait_for() -> None:
    clock = HandClock()
    gate = rank_gate(clock, wait_ms_max=2_000)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with ExitStack() as held:
        assert fill(gate, held, ask(budget_ms=10_000)) == pytest.approx(0.8 * 2.0, abs=0.05)


@pytest.mark.parametrize(("after_s", "allowed_s"), [(0.6, 0.8), (0.71, 0.4)])
def test_a_queue_that_stands_is_kept_short(after_s: float, allowed_s: float) -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with ExitStack() as held:
        for _ in range(5):
            held.enter_context(gate.admit(ask()))
        clock.set(clock.monotonic_s() + after_s)
        gate.capacity.begin(0.0)  # a busy mesh: the queue is seen, the window of the estimate is not of interest
        assert fill(gate, held, ask()) == pytest.approx(allowed_s, abs=0.05)
        assert gate.load == pytest.approx(allowed_s / 0.4, abs=0.1)


def test_a_queue_that_was_short_a_moment_ago_does_not_stand() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    for _ in range(4):
        with ExitStack() as held:
            for _ in range(5):
                held.enter_context(gate.admit(ask()))
            clock.set(clock.monotonic_s() + 0.4)
    assert not gate.capacity.queue_stands


def test_budgets_that_nothing_can_meet_do_not_make_the_mesh_look_slow() -> None:
    """A client that gives 10 ms to requests that take 67, one after the other, and somebody else's burst after it."""
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(25, 0, 10, 1))
    for _ in range(1_000):
        with gate.admit(ask(budget_ms=10)) as place:
            clock.set(clock.monotonic_s() + 0.01)
            place.is_late = True
    assert gate.capacity.rate == pytest.approx(15, rel=0.25)  # what one at a time would get
    with ExitStack() as held:
        for _ in range(10):
            held.enter_context(gate.admit(ask(budget_ms=2_000)))


def test_requests_that_fail_at_once_do_not_make_the_mesh_look_quicker_than_its_answers_were() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(15, 0, 10, 1))
    held: list[ExitStack] = []
    for _ in range(10_000):
        clock.set(clock.monotonic_s() + 0.001)
        if len(held) == 4:
            held.pop(0).close()
        held.append(ExitStack())
        held[-1].enter_context(gate.admit(ask()))
    assert 15 <= (gate.capacity.rate or 0.0) <= 35  # its answers say 30


def test_after_a_stall_a_few_are_let_in_as_soon_as_answers_are_quick_again() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(5, 0, 10, 1))
    stalled = simulate(gate, clock, [(3.0 * number, ask(budget_ms=10_000)) for number in range(12)], service_s=2.0)
    assert len(stalled.in_time) == 12
    with ExitStack() as held:
        held.enter_context(gate.admit(ask()))
        with pytest.raises(OverloadedError):
            held.enter_context(gate.admit(ask()))
    for _ in range(3):
        with gate.admit(ask()) as place:
            clock.set(clock.monotonic_s() + 1 / 15)
            place.is_served = True
    assert (gate.capacity.rate or 0.0) < 1  # the windows still say so
    with ExitStack() as held:
        for _ in range(5):
            held.enter_context(gate.admit(ask()))


def test_where_nothing_was_served_it_is_tried_one_at_a_time() -> None:
    """All late once, say while the cores are somebody else's, must not mean that as many are let in as at the start."""
    clock = HandClock()
    gate = rank_gate(clock)
    for _ in range(2):
        with ExitStack() as held:
            fill(gate, held, ask())
            clock.set(clock.monotonic_s() + 3.0)
    with gate.admit(ask()), pytest.raises(OverloadedError) as caught, gate.admit(ask()):
        pass
    assert float(caught.value.context["retry_after_s"] or 0) <= 10
    simulate(gate, clock, poisson(60, 0, 10, 1))
    assert gate.capacity.rate == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize("in_flight_min", [1, 6])
def test_a_few_at_once_are_no_queue_however_long_one_takes(in_flight_min: int) -> None:
    """Capacity that was measured on one request at a time says nothing of what works in parallel."""
    clock = HandClock()
    gate = rank_gate(clock, in_flight_min=in_flight_min)
    simulate(gate, clock, poisson(0.5, 0, 30, 1, ask(budget_ms=10_000)), service_s=0.9)
    with ExitStack() as held:
        fill(gate, held, ask(budget_ms=10_000))
        assert gate.in_flight == in_flight_min


def test_a_request_alone_on_a_slow_machine_is_no_load() -> None:
    """Its own time is no queue, however little was served of late: the best tier serves it."""
    clock = HandClock()
    gate = rank_gate(clock, in_flight_min=3)
    simulate(gate, clock, [(float(second), ask(budget_ms=10_000)) for second in range(20)], service_s=0.9)
    with ExitStack() as held:
        for in_flight in (1, 2, 3):
            held.enter_context(gate.admit(ask(budget_ms=10_000)))
            assert (gate.load > IngressConfig().light_above_load) == (in_flight >= 3)


@pytest.mark.parametrize(("rate", "ratio"), [(30, 0.95), (30, 4.0)])
def test_answers_come_soon_under_overload_as_they_do_before_it(rate: float, ratio: float) -> None:
    clock = HandClock()
    outcome = simulate(rank_gate(clock), clock, poisson(rate * ratio, 0, 30, 1))
    later = [latency_s for came_s, latency_s in outcome.latencies_s.items() if came_s > 5]
    assert np.quantile(later, 0.99) <= 0.55


@pytest.mark.parametrize(
    ("error", "is_cut"),
    [
        (DeadlineExceededError("late", stage="ranking", deadline_ms=1_000), True),
        (StageUnavailableError("preprocess did not answer, twice", stage="preprocess"), True),
        (OverloadedError("ranking:full holds 32 pieces of work", retry_after_s=1), True),
        (InvalidRequestError("no", field="tier", limit="full", value="x"), False),
    ],
)
def test_misses_cut_what_may_be_waited_and_answers_give_it_back(error: RankMeshError, is_cut: bool) -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    full = gate.capacity.share
    with ExitStack() as held:
        for _ in range(15):
            held.enter_context(gate.admit(ask()))
        with pytest.raises(type(error)), gate.admit(ask()):
            raise error
    assert (gate.capacity.share < full) == is_cut
    simulate(gate, clock, poisson(15, 0, 10, 1))
    assert gate.capacity.share == full


def test_a_miss_that_load_did_not_cause_cuts_nothing() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with pytest.raises(DeadlineExceededError), gate.admit(ask()):
        raise DeadlineExceededError("late", stage="ranking", deadline_ms=1_000)
    assert gate.capacity.share == 0.8


def test_idle_time_says_nothing_of_capacity_whatever_the_requests_were() -> None:
    """A few overlapping requests a minute, of different sizes, and then a burst."""
    clock = HandClock()
    gate = rank_gate(clock)
    sizes = (20, 500, 333, 1_000)
    for minute in range(100):
        few = [(number * 0.02, ask(num_candidates=sizes[(minute + number) % 4])) for number in range(4)]
        assert not simulate(gate, clock, few).shed
        clock.set(clock.monotonic_s() + 60.0)
    assert gate.capacity.in_flight_work == 0
    assert (gate.capacity.rate or 0.0) > 10
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(gate.admit(ask()))


async def test_overload_is_shed_before_any_station_is_called() -> None:
    mesh = FakeMesh(IngressConfig(in_flight_max=2))
    mesh.services["sequence"].always("encode", HANG)
    request = RankRequest(user_id=1, candidates=[1, 2])
    held = [asyncio.create_task(mesh.ingress.rank(request)) for _ in range(2)]
    await mesh.manual.advance(0.001)
    started = mesh.services["preprocess"].started["extract"]

    with pytest.raises(OverloadedError):
        await mesh.ingress.rank(request)

    assert mesh.services["preprocess"].started["extract"] == started == 2
    for task in held:
        task.cancel()
    await mesh.manual.advance(0)
    assert mesh.ingress.counters()["shed_requests.rank"] == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"deadline_ms": 20}, "deadline_ms"), ({"deadline_ms": 60_000}, "deadline_ms"), ({"limit": 5_000}, "limit")],
)
async def test_what_no_retry_makes_right_is_not_told_to_come_back(changes: dict[str, Any], field: str) -> None:
    clock = HandClock()
    mesh = FakeMesh(IngressConfig(), clock)
    gate = mesh.ingress.rank_gate
    simulate(gate, clock, poisson(60, 0, 10, 1))
    with ExitStack() as held:
        fill(gate, held, ask())
        with pytest.raises(InvalidRequestError, match=f"{field} must be"):
            await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1, 2], **changes))


async def test_quality_goes_before_answers_do() -> None:
    clock = HandClock()
    mesh = FakeMesh(IngressConfig(), clock)
    gate = mesh.ingress.rank_gate
    simulate(gate, clock, poisson(60, 0, 10, 1))
    request = RankRequest(user_id=1, candidates=[1, 2])
    with ExitStack() as held:
        assert (await mesh.ingress.rank(request))["tier"] == "full"
        while gate.load <= IngressConfig().light_above_load:
            held.enter_context(gate.admit(ask()))
        answer = await mesh.ingress.rank(request)
    assert answer["tier"] == "light"
    assert answer["tier_reason"].startswith("load: ")
