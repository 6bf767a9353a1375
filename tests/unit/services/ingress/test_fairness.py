"""Shares of tenants and surfaces: nobody takes another's, and what nobody wants is anybody's."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from services.ingress.fairness import Caller, Shares
from shared.clock import ManualClock
from shared.errors import OverloadedError
from tests.helpers.admission import HandClock, ask, poisson, rank_gate, simulate


def test_a_quiet_caller_gets_its_share_beside_one_that_wants_everything() -> None:
    clock = HandClock()
    quiet, loud = Caller("", "quiet"), Caller("", "loud")
    arrivals = poisson(120, 0, 20, 1, ask(caller=loud)) + poisson(6, 0, 20, 2, ask(caller=quiet))
    outcome = simulate(rank_gate(clock), clock, sorted(arrivals, key=lambda arrival: arrival[0]))
    sent = len(poisson(6, 0, 20, 2))
    assert outcome.of_caller["quiet"] >= 0.95 * sent
    assert outcome.of_caller["loud"] >= 0.9 * (30 * 20 - sent)


@pytest.mark.parametrize(
    ("loud", "quiet"),
    [
        (Caller("loud", "feed"), [Caller("quiet", "quiet")]),
        (Caller("loud", "feed"), [Caller(f"quiet {number}", "quiet") for number in range(12)]),
        (Caller("", "feed"), [Caller("", "quiet")]),
    ],
)
def test_who_wants_little_gets_it_on_rough_cores_as_well(loud: Caller, quiet: list[Caller]) -> None:
    """A queue that is full, and now and then over, of one caller's five times what can be answered."""
    clock = HandClock()
    arrivals = poisson(95, 0, 30, 1, ask(num_candidates=200, caller=loud))
    few = poisson(2, 0, 30, 2)
    arrivals += [
        (at_s, ask(num_candidates=200, caller=quiet[number % len(quiet)])) for number, (at_s, _) in enumerate(few)
    ]
    arrivals.sort(key=lambda arrival: arrival[0])
    outcome = simulate(rank_gate(clock), clock, arrivals, service_s=2 / 19, is_rough=True)
    assert outcome.of_caller["quiet"] >= 0.8 * len(few)
    assert outcome.of_caller["feed"] >= 0.6 * 30 * 19 / 1.13


def test_a_loud_tenant_is_refused_before_its_bodies_are_read() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    clock.set(clock.monotonic_s() + 10.0)  # whoever that was is gone
    gate._shares.ask(Caller("quiet", "feed"), 6.0)
    with ExitStack() as held:
        with suppress(OverloadedError):
            while True:
                held.enter_context(gate.admit(ask(caller=Caller("loud", "feed"))))
        with pytest.raises(OverloadedError, match="loud has its share"):
            gate.check("loud")
        gate.check("quiet")
        held.enter_context(gate.admit(ask(caller=Caller("quiet", "feed"))))


def test_who_has_less_than_its_share_may_wait_in_a_queue_that_stands() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    clock.set(clock.monotonic_s() + 10.0)  # whoever that was is gone
    loud, quiet = ask(caller=Caller("loud", "feed")), ask(caller=Caller("quiet", "feed"))
    with ExitStack() as held:
        for _ in range(15):
            held.enter_context(gate.admit(loud))
        clock.set(clock.monotonic_s() + 0.71)
        with pytest.raises(OverloadedError, match="400 ms of the budget"):
            held.enter_context(gate.admit(loud))
        with suppress(OverloadedError):
            while True:
                gate.check("quiet")
                held.enter_context(gate.admit(quiet))
        assert gate.in_flight - 15 in (5, 6)  # half of the 12 that fit into a queue that stands
        with pytest.raises(OverloadedError):
            held.enter_context(gate.admit(ask(budget_ms=400, caller=Caller("third", "feed"))))  # it does not fit


def test_weights_share_what_all_want() -> None:
    clock = HandClock()
    callers = [Caller("", "heavy"), Caller("", "light")]
    arrivals = [poisson(60, 0, 20, seed, ask(caller=caller)) for seed, caller in enumerate(callers)]
    gate = rank_gate(clock, weights={"heavy": 3.0})
    outcome = simulate(gate, clock, sorted(arrivals[0] + arrivals[1], key=lambda arrival: arrival[0]))
    assert 2.0 <= outcome.of_caller["heavy"] / outcome.of_caller["light"] <= 4.0


@pytest.mark.parametrize(("num_callers", "kept"), [(2, 2), (3, 3), (4, 4), (5, 4)])
def test_callers_beyond_the_bound_are_one(num_callers: int, kept: int) -> None:
    shares = Shares({}, 1.0, 3, ManualClock())
    counted = {shares.ask(Caller(str(number), "s"), 1.0) for number in range(num_callers)}
    assert len(counted) == kept
    assert (Caller("others", "others") in counted) == (num_callers > 3)


def test_a_tenant_that_makes_up_surfaces_has_no_more_for_it() -> None:
    clock = HandClock()
    loud = [ask(caller=Caller("loud", f"s{number}")) for number in range(20)]
    arrivals = [(at_s, loud[number % 20]) for number, (at_s, _) in enumerate(poisson(120, 0, 20, 1))]
    arrivals += poisson(15, 0, 20, 2, ask(caller=Caller("quiet", "feed")))
    outcome = simulate(rank_gate(clock), clock, sorted(arrivals, key=lambda arrival: arrival[0]))
    assert outcome.of_caller["feed"] >= 0.7 * len(poisson(15, 0, 20, 2))


def test_a_tenant_with_many_surfaces_takes_nobody_elses_place_in_the_table() -> None:
    shares = Shares({}, 1.0, 3, ManualClock())
    loud = {shares.ask(Caller("loud", f"s{number}"), 1.0) for number in range(50)}
    assert len(loud) == 4
    assert shares.ask(Caller("quiet", "feed"), 1.0) == Caller("quiet", "feed")
    assert len(shares) <= 2 + 4 + 1


def test_who_was_there_once_is_forgotten_whatever_its_requests_were() -> None:
    """Sums of works drift: 1.3 + 1.01 - 1.3 - 1.01 is above 0, and so the caller would be held for ever."""
    clock = HandClock()
    gate = rank_gate(clock)
    for number in range(300):
        sizes = (500, 20, 333, 1_000)
        once = Caller(str(number), "feed")
        simulate(gate, clock, [(0.01 * at, ask(num_candidates=size, caller=once)) for at, size in enumerate(sizes)])
        clock.set(clock.monotonic_s() + 10.0)
    assert len(gate._shares) <= 2


def test_where_places_run_out_before_time_they_are_shared_as_well() -> None:
    """A mesh that answers 1,000 a second and may hold 64: one tenant's 2,000 a second leave room for another's 40."""
    clock = HandClock()
    loud, quiet = ask(caller=Caller("loud", "loud")), ask(caller=Caller("quiet", "quiet"))
    arrivals = poisson(2_000, 0, 3, 1, loud) + poisson(40, 0, 3, 2, quiet)
    gate = rank_gate(clock, in_flight_max=64)
    outcome = simulate(gate, clock, sorted(arrivals, key=lambda arrival: arrival[0]), service_s=1 / 500)
    assert outcome.of_caller["quiet"] >= 0.8 * len(poisson(40, 0, 3, 2))
    assert outcome.of_caller["loud"] >= 0.8 * 3 * 1_000


def test_who_is_refused_before_its_body_is_read_finds_room_the_next_time() -> None:
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1))
    clock.set(clock.monotonic_s() + 10.0)  # whoever that was is gone
    loud, quiet = Caller("loud", "feed"), Caller("quiet", "feed")
    with ExitStack() as held:
        places = [held.enter_context(ExitStack()) for _ in range(100)]
        for place in places:
            with suppress(OverloadedError):
                place.enter_context(gate.admit(ask(caller=loud)))
        with pytest.raises(OverloadedError):
            gate.check(quiet.tenant)
        clock.set(clock.monotonic_s() + 0.2)
        for place in places[:2]:
            place.close()
        for _ in range(10):  # who is loud would take what has become free
            with suppress(OverloadedError):
                held.enter_context(gate.admit(ask(caller=loud)))
        gate.check(quiet.tenant)
        held.enter_context(gate.admit(ask(caller=quiet)))


def test_one_request_of_another_costs_a_place_or_two_and_only_for_a_while() -> None:
    clock = HandClock()
    shares, loud = Shares({}, 1.0, 8, clock), Caller("", "loud")
    shares.ask(Caller("", "once"), 1.0)
    shares.ask(loud, 1.0)
    assert shares.has_room(loud, 8.5, 10.0)
    assert not shares.has_room(loud, 8.6, 10.0)
    clock.set(clock.monotonic_s() + 1.0)
    assert shares.has_room(loud, 9.4, 10.0)
    assert not shares.has_room(loud, 9.5, 10.0)
    clock.set(clock.monotonic_s() + 3.0)
    shares.ask(loud, 1.0)
    assert shares.has_room(loud, 10.0, 10.0)


def test_what_is_kept_for_another_is_at_most_its_share() -> None:
    shares, first, second = Shares({"heavy": 3.0}, 1.0, 8, HandClock()), Caller("", "heavy"), Caller("", "light")
    for caller in (first, second):
        shares.ask(caller, 100.0)
    assert shares.has_room(first, 7.5, 10.0)
    assert not shares.has_room(first, 7.6, 10.0)
    assert shares.has_room(second, 2.5, 10.0)
    assert not shares.has_room(second, 2.6, 10.0)
