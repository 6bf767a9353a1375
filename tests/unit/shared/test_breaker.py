"""Circuit breakers: when one opens, who is refused or sent elsewhere, who tries, and what closes it."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from shared.breaker import BreakerConfig, Breakers, Trip
from shared.clock import ManualClock
from shared.errors import StageSilentError


class HandClock(ManualClock):
    """A clock that a test sets, without an event loop."""

    def pass_s(self, duration_s: float) -> None:
        self._time_s += duration_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def breakers(clock: HandClock) -> Breakers:
    config = BreakerConfig(failures=3, silent_ms=200, apart_ms=50, open_ms=500)
    breakers = Breakers("embedding:0", config, clock, limit_s=0.4)
    answer(breakers, clock, "a", 8)
    return breakers


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def answer(breakers: Breakers, clock: HandClock, replica: str, number: int = 1, taken_s: float = 0.01) -> None:
    for _ in range(number):
        trip = Trip(breakers)
        trip.sent_to(replica)
        clock.pass_s(taken_s)
        trip.answered()


def leave_unanswered(breakers: Breakers, clock: HandClock, replica: str, number: int = 1, taken_s: float = 0.3) -> None:
    for _ in range(number):
        trip = Trip(breakers)
        trip.sent_to(replica)
        clock.pass_s(taken_s)
        PendingCall().give_up(trip)


class PendingCall:
    """A call that ends when a test says so, and counts how often it is stopped."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.num_stopped = 0

    def give_up(self, trip: Trip) -> None:
        trip.given_up(cast(Any, self), self.cancel)

    async def failure(self) -> None:
        await self.end.wait()

    def cancel(self) -> None:
        self.num_stopped += 1


def test_a_few_unanswered_calls_in_a_row_open_it(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 2)
    assert breakers.open == []
    leave_unanswered(breakers, clock, "a")
    assert breakers.open == ["a"]
    assert breakers.usable(["a", "b"]) == ["b"]
    assert breakers.num_opened == 1


def test_an_answer_in_between_starts_the_row_anew(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 2)
    answer(breakers, clock, "a")
    leave_unanswered(breakers, clock, "a", 2)
    assert breakers.open == []


def test_a_replica_that_answers_others_is_slow_and_not_silent(breakers: Breakers, clock: HandClock) -> None:
    for _ in range(10):
        slow, quick = Trip(breakers), Trip(breakers)
        slow.sent_to("a")
        clock.pass_s(0.2)
        quick.sent_to("a")
        clock.pass_s(0.1)
        quick.answered()
        clock.pass_s(0.1)
        assert slow.patience_s == pytest.approx(0.1)
        PendingCall().give_up(slow)
    assert breakers.open == []


def test_calls_with_small_budgets_say_nothing(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 20, taken_s=0.199)
    assert breakers.open == []


def test_what_answers_take_is_not_silence_up_to_the_limit(breakers: Breakers, clock: HandClock) -> None:
    """A station of a large model answers nobody for 300 ms at a time: who does not wait that long says nothing."""
    answer(breakers, clock, "a", taken_s=0.3)
    assert breakers.silent_s() == pytest.approx(0.3)
    leave_unanswered(breakers, clock, "a", 5, taken_s=0.28)
    assert breakers.open == []
    answer(breakers, clock, "a", taken_s=5.0)  # its caller did not give it up
    leave_unanswered(breakers, clock, "a", 3, taken_s=0.4)
    assert breakers.open == ["a"]


def test_before_answers_are_known_only_the_limit_counts(clock: HandClock) -> None:
    breakers = Breakers("embedding:0", BreakerConfig(silent_ms=200), clock, limit_s=0.4)
    answer(breakers, clock, "a", 7)
    leave_unanswered(breakers, clock, "a", 3, taken_s=0.39)
    assert breakers.open == []
    leave_unanswered(breakers, clock, "a", 3, taken_s=0.4)
    assert breakers.open == ["a"]


def test_what_is_given_up_at_one_moment_counts_once(breakers: Breakers, clock: HandClock) -> None:
    """A caller that stood still finds all of its calls too late when it goes on."""
    trips = [Trip(breakers) for _ in range(10)]
    for trip in trips:
        trip.sent_to("a")
    clock.pass_s(5.0)
    for trip in trips:
        PendingCall().give_up(trip)
        clock.pass_s(0.004)
    assert breakers.open == []


class Tried(PendingCall):
    """Counts the calls that try replicas too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __call__(self, name: str) -> Any:
        self.names.append(name)
        return self


async def test_with_no_replica_left_calls_are_refused_and_copies_try(breakers: Breakers, clock: HandClock) -> None:
    for replica in ("a", "b"):
        leave_unanswered(breakers, clock, replica, 3)
    tried = Tried()
    for _ in range(100):
        await clock.advance(0.01)
        breakers.try_silent(tried)
        with pytest.raises(StageSilentError, match="none of 2 replicas answers") as caught:
            breakers.check(["a", "b"])
    assert caught.value.context["stage"] == "embedding:0"
    assert not caught.value.retryable
    assert sorted(tried.names) == ["a"] * 2 + ["b"] * 2, "each is tried twice a second, however many calls there are"
    assert (breakers.num_refused, breakers.num_tried) == (100, 4)
    await clock.advance(0.4)
    assert tried.num_stopped == 4


class Left:
    """The last of the calls that opened the breaker of a replica."""

    def __init__(self, breakers: Breakers, clock: HandClock, *, may_stay: bool = True) -> None:
        leave_unanswered(breakers, clock, "a", 2)
        self.call, self.trip = PendingCall(), Trip(breakers, may_stay=may_stay)
        self.trip.sent_to("a")
        clock.pass_s(0.3)
        self.call.give_up(self.trip)
        assert breakers.open == ["a"]


async def test_the_call_that_opens_a_breaker_is_left_to_try_and_its_answer_closes_it(
    breakers: Breakers, clock: HandClock
) -> None:
    left = Left(breakers, clock)
    left.call.give_up(left.trip)  # a request gives up all of its calls at its end
    assert (left.call.num_stopped, left.trip.is_left, breakers.num_tried) == (0, True, 1)
    await clock.advance(0.1)
    left.trip.answered()
    left.call.end.set()
    assert breakers.open == []
    await settle()
    assert not breakers._tries, "what has ended is not watched"


async def test_how_long_a_silence_took_is_not_what_answers_take(breakers: Breakers, clock: HandClock) -> None:
    usual_s = breakers.silent_s()
    left = Left(breakers, clock)
    await clock.advance(0.39)
    left.trip.answered()
    assert (breakers.open, breakers.silent_s()) == ([], usual_s)
    leave_unanswered(breakers, clock, "a", 3)
    assert breakers.open == ["a"], "the next silence is seen as soon as this one"


async def test_a_call_that_was_left_is_stopped_at_the_limit(breakers: Breakers, clock: HandClock) -> None:
    left = Left(breakers, clock)
    await clock.advance(0.39)
    assert left.call.num_stopped == 0
    await clock.advance(0.02)
    assert left.call.num_stopped == 1
    assert (breakers.open, breakers.num_opened) == (["a"], 1)
    assert left.trip.patience_s == math.inf


async def test_only_what_opens_a_breaker_is_left_and_only_if_it_changes_nothing(
    breakers: Breakers, clock: HandClock
) -> None:
    stays = Left(breakers, clock, may_stay=False)
    assert (stays.call.num_stopped, breakers.num_tried) == (1, 0)
    for _ in range(5):
        trip, call = Trip(breakers, may_stay=True), PendingCall()
        trip.sent_to("a")
        clock.pass_s(0.3)
        call.give_up(trip)
        assert call.num_stopped == 1
    assert breakers.num_tried == 0


def test_a_station_without_replicas_is_not_a_silent_one(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 3)
    breakers.check([])
    breakers.check(["a", "b"])


def test_who_calls_all_the_same_may_go_anywhere(breakers: Breakers, clock: HandClock) -> None:
    for replica in ("a", "b"):
        leave_unanswered(breakers, clock, replica, 3)
    assert breakers.usable(["a", "b"]) == ["a", "b"]


async def test_after_a_pause_without_calls_the_next_one_goes_out(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 3)
    clock.pass_s(0.999)
    with pytest.raises(StageSilentError):
        breakers.check(["a"])
    clock.pass_s(0.002)
    breakers.check(["a"])
    assert breakers.open == []
    leave_unanswered(breakers, clock, "a")
    assert breakers.open == ["a"], "one more is enough"
    assert breakers.num_opened == 2


def test_any_answer_closes_it(breakers: Breakers, clock: HandClock) -> None:
    leave_unanswered(breakers, clock, "a", 3)
    trip = Trip(breakers)
    trip.sent_to("a")
    trip.answered()
    assert breakers.open == []
    assert breakers.usable(["a", "b"]) == ["a", "b"]
    leave_unanswered(breakers, clock, "a", 2)
    assert breakers.open == []


def test_a_try_that_fails_leaves_it_open_and_is_not_counted_as_another_silence(
    breakers: Breakers, clock: HandClock
) -> None:
    leave_unanswered(breakers, clock, "a", 10)
    assert breakers.open == ["a"]
    assert breakers.num_opened == 1


def test_a_call_that_broke_or_has_ended_says_nothing_more(breakers: Breakers, clock: HandClock) -> None:
    for end in (Trip.lost, Trip.answered):
        for _ in range(5):
            trip = Trip(breakers)
            trip.sent_to("a")
            clock.pass_s(0.3)
            end(trip)
            PendingCall().give_up(trip)
            assert trip.patience_s == math.inf
    assert breakers.open == []


def test_a_call_that_no_replica_has_is_not_in_vain(breakers: Breakers, clock: HandClock) -> None:
    trip = Trip(breakers)
    clock.pass_s(1.0)
    assert trip.patience_s == math.inf
    PendingCall().give_up(trip)


def test_replicas_that_are_gone_are_forgotten_for_good(breakers: Breakers, clock: HandClock) -> None:
    trip = Trip(breakers)
    trip.sent_to("a")
    leave_unanswered(breakers, clock, "a", 3)
    breakers.keep({"b"})
    assert breakers.open == []
    PendingCall().give_up(trip)
    breakers.answered("a", 0.0)
    assert not breakers._replicas
