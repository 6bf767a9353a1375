"""Pending results over Serve: passed on, watched, asked why they failed, cancelled."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from cluster.config import Transport
from cluster.handles import ERROR_BYTES_MAX, RayCall, RayHandle
from shared.breaker import BreakerConfig, Breakers
from shared.clock import ManualClock
from shared.errors import OverloadedError, StageSilentError, StageUnavailableError, StoreUnavailableError
from tests.unit.cluster.fake_serve import FakeReference, FakeResponse, FakeServeHandle

TRANSPORTS: dict[str, Transport] = {
    "make": "reference",
    "use": "reference",
    "weigh": "by_size",
    "append": "value",
    "encode": "reference",
}
VALUE_BYTES_MAX = 1_000


def handle(
    serve: FakeServeHandle, name: str = "station", result_bytes: int = 0, breakers: Breakers | None = None
) -> RayHandle:
    breakers = breakers or Breakers(name, BreakerConfig(), ManualClock())
    return RayHandle(name, cast(Any, serve), TRANSPORTS, VALUE_BYTES_MAX, breakers, lambda _: result_bytes)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_reference_is_passed_on_unawaited_and_unfetched() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    made = handle(upstream).call("make", 1)
    used = handle(downstream).call("use", made, 2)
    upstream.last.put("tensor")
    await settle()
    assert downstream.last.args == (upstream.last.reference, 2)
    downstream.last.put("answer")
    assert await used == "answer"
    assert upstream.last.reference.num_fetches == 0


async def test_a_result_that_exists_is_passed_on_at_once() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    made = handle(upstream).call("make")
    upstream.last.put("tensor")
    await made.ready()
    handle(downstream).call("use", made)
    assert downstream.last.args == (upstream.last.reference,)


async def test_all_who_wait_for_a_result_share_one_look_at_it() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    made = handle(upstream).call("make")
    for _ in range(3):
        handle(downstream).call("use", made)
    watching = asyncio.ensure_future(made.ready())
    upstream.last.put("tensor")
    await settle()
    assert watching.done()
    assert len(downstream.calls) == 3
    assert upstream.last.reference.num_looks == 1


async def test_a_failed_result_is_passed_on_for_the_callee_to_find() -> None:
    """Nobody has fetched it, so nobody here knows; Ray fails the call that reads it."""
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    used = handle(downstream).call("use", handle(upstream).call("make"))
    upstream.last.fail(ActorDiedError())
    await settle()
    assert downstream.last.args == (upstream.last.reference,)
    downstream.last.fail(ActorDiedError())
    assert isinstance(await used.failure(), StageUnavailableError)


async def test_ready_waits_for_the_end_and_moves_nothing() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    waiting = asyncio.ensure_future(call.ready())
    serve.last.accept()
    await settle()
    assert not waiting.done()
    serve.last.reference.put("tensor")
    await waiting
    assert serve.last.reference.num_fetches == 0


async def test_ready_ends_for_failed_calls_too() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    serve.last.refuse(BackPressureError(3, 2))
    await call.ready()


async def test_the_value_of_a_call_by_value() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("append", [1])
    serve.last.put({"appended": 1})
    assert await call == {"appended": 1}
    assert await call.failure() is None
    assert not serve.last.by_reference


@pytest.mark.parametrize(
    ("payload_bytes", "by_reference"), [(0, False), (VALUE_BYTES_MAX, False), (VALUE_BYTES_MAX + 1, True), (None, True)]
)
async def test_size_decides_how_a_call_travels(payload_bytes: int | None, by_reference: bool) -> None:
    serve = FakeServeHandle()
    handle(serve).call("weigh", payload_bytes=payload_bytes)
    assert serve.last.by_reference == by_reference


@pytest.mark.parametrize(("method", "by_reference"), [("make", True), ("append", False), ("unheard_of", False)])
async def test_size_is_nothing_to_a_call_with_a_transport_of_its_own(method: str, by_reference: bool) -> None:
    serve = FakeServeHandle()
    for payload_bytes in (0, 10 * VALUE_BYTES_MAX):
        handle(serve).call(method, payload_bytes=payload_bytes)
        assert serve.last.by_reference == by_reference


async def test_arguments_of_a_call_by_value_are_awaited_first() -> None:
    """Serve's router never sees a pending argument then: one whose replica died would keep it busy for ever."""
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    made = handle(upstream).call("make")
    stored = handle(downstream).call("append", made)
    await settle()
    assert downstream.calls == []
    upstream.last.put("tensor")
    await settle()
    assert downstream.last.args == ("tensor",)
    downstream.last.put(1)
    assert await stored == 1


async def test_a_call_by_reference_takes_the_value_of_one_by_value() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    small = handle(upstream).call("append")
    used = handle(downstream).call("use", small)
    chained = handle(downstream).call("use", used)  # and so does what waits for it in turn
    upstream.last.put(7)
    await settle()
    first = downstream.calls[0][1]
    assert first.args == (7,)
    first.put(8)
    await settle()
    assert downstream.last.args == (first.reference,)
    downstream.last.put(9)
    assert await chained == 9


async def test_the_failure_of_an_argument_is_the_failure_of_the_call() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    made = handle(upstream, "store").call("append")
    used = handle(downstream).call("use", made)
    upstream.last.fail(StoreUnavailableError("gone"))
    failure = await used.failure()
    assert isinstance(failure, StoreUnavailableError)
    assert downstream.calls == []


async def test_failure_says_why() -> None:
    serve = FakeServeHandle()
    station = handle(serve, "embedding:1")
    died, dropped, fine = station.call("make"), station.call("make"), station.call("make")
    responses = [response for _, response in serve.calls]
    responses[0].fail(ActorDiedError())
    responses[1].refuse(BackPressureError(3, 2))
    responses[2].put("tensor")
    failure = await died.failure()
    assert isinstance(failure, StageUnavailableError)
    assert failure.context["stage"] == "embedding:1"
    assert isinstance(await dropped.failure(), OverloadedError)
    assert await fine.failure() is None


async def test_failure_fetches_small_results_only() -> None:
    serve = FakeServeHandle()
    at_limit = handle(serve, result_bytes=ERROR_BYTES_MAX).call("make")
    serve.last.put("small")
    assert await at_limit.failure() is None
    assert serve.last.reference.num_fetches == 1
    over = handle(serve, result_bytes=ERROR_BYTES_MAX + 1).call("make")
    serve.last.put("large")
    assert await over.failure() is None
    assert serve.last.reference.num_fetches == 0


async def test_awaiting_a_failed_call_raises_our_error() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    serve.last.fail(ActorDiedError())
    with pytest.raises(StageUnavailableError, match="died under the call"):
        await call
    with pytest.raises(StageUnavailableError):  # again, for whoever asks second
        await call


def stopped_before_acceptance(response: FakeResponse) -> None:
    del response  # no replica yet


def stopped_at_acceptance(response: FakeResponse) -> None:
    response.accept()  # the caller has not been told yet


@pytest.mark.parametrize("moment", [stopped_before_acceptance, stopped_at_acceptance])
@pytest.mark.parametrize("method", ["make", "append"])
async def test_cancel_stops_the_callee_at_any_moment(method: str, moment: Any) -> None:
    serve = FakeServeHandle()
    call = handle(serve).call(method)
    await settle()
    moment(serve.last)
    call.cancel()
    await settle()
    assert serve.last.was_stopped
    assert isinstance(await call.failure(), StageUnavailableError)


@pytest.mark.parametrize("method", ["make", "append"])
async def test_cancel_stops_a_callee_that_works(method: str) -> None:
    serve = FakeServeHandle()
    call = handle(serve).call(method)
    serve.last.accept()
    await settle()
    call.cancel()
    assert serve.last.result.num_cancels == 1


async def test_cancel_while_arguments_are_awaited_makes_no_call() -> None:
    upstream, downstream = FakeServeHandle(), FakeServeHandle()
    stored = handle(downstream).call("append", handle(upstream).call("make"))
    await settle()
    stored.cancel()
    upstream.last.put("tensor")
    await settle()
    assert downstream.calls == []


async def test_cancel_after_the_end_is_harmless() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    serve.last.put("tensor")
    await call.ready()
    call.cancel()
    assert await call == "tensor"


async def test_cancelling_who_waits_does_not_cancel_the_call() -> None:
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    serve.last.accept()
    waiting = [asyncio.ensure_future(call.ready()), asyncio.ensure_future(_value(call))]
    await settle()
    for each in waiting:
        each.cancel()
    await settle()
    assert [each.cancelled() for each in waiting] == [True, True]
    assert not serve.last.was_stopped


async def test_a_cancelled_upstream_is_a_failure_not_a_cancellation_of_the_caller() -> None:
    """Serve ends the downstream response with a bare CancelledError, which must not pass for the caller's own."""
    serve = FakeServeHandle()
    call = handle(serve).call("make")
    serve.last._replica_result_future.cancel()
    with pytest.raises(StageUnavailableError, match="cancelled"):
        await call


async def test_a_station_that_lost_its_replicas_refuses_at_once() -> None:
    serve = FakeServeHandle(num_replicas=1)
    station = handle(serve, "sequence")
    assert isinstance(station.call("make"), RayCall)
    assert len(serve.calls) == 1
    serve.replicas.clear()
    call = station.call("make")
    assert len(serve.calls) == 1
    failure = await call.failure()
    assert isinstance(failure, StageUnavailableError)
    assert "no live replica" in failure.message
    chained = handle(FakeServeHandle()).call("use", call)
    assert isinstance(await chained.failure(), StageUnavailableError)


async def test_a_station_that_may_have_no_replica_is_called_all_the_same() -> None:
    """The call that waits is what makes it come back."""
    serve = FakeServeHandle(num_replicas=0)
    breakers = Breakers("foundation", BreakerConfig(), ManualClock())
    station = RayHandle("foundation", cast(Any, serve), {}, 1_000, breakers, waits_for_first=True)
    call = station.call("make")
    assert len(serve.calls) == 1
    serve.last.put(7)
    assert await call == 7


async def test_a_station_that_was_not_heard_of_yet_is_waited_for() -> None:
    serve = FakeServeHandle(num_replicas=None)
    handle(serve).call("make")
    assert len(serve.calls) == 1


async def test_a_failure_that_nobody_asks_for_is_not_reported_as_lost() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    serve = FakeServeHandle()
    call = handle(serve).call("append")
    serve.last.fail(ActorDiedError())
    await settle()
    del call
    await settle()
    assert reports == []


async def _value(call: RayCall) -> Any:
    return await call


def test_the_fake_waits_like_a_reference() -> None:
    async def check() -> None:
        reference = FakeReference()
        reference.put(1)
        assert await reference == 1

    asyncio.run(check())


class Watched:
    """A station whose only replica's breaker opens with the first call that it leaves unanswered for 200 ms."""

    def __init__(self) -> None:
        self.serve = FakeServeHandle(num_replicas=1)
        self.clock = ManualClock()
        self.breakers = Breakers("embedding:0", BreakerConfig(failures=1), self.clock, limit_s=0.2)
        self.station = handle(self.serve, "embedding:0", breakers=self.breakers)

    async def leave_unanswered(self, method: str, taken_s: float = 0.3) -> None:
        call = self.station.call(method, needed=True)
        self.serve.last.choose("replica-0")
        await self.clock.advance(taken_s)
        assert call.patience_s == pytest.approx(0.2 - taken_s)
        call.cancel()
        await settle()


@pytest.mark.parametrize("method", ["make", "append"])
async def test_a_call_that_is_given_up_unanswered_opens_the_breaker_of_its_replica(method: str) -> None:
    watched = Watched()
    await watched.leave_unanswered(method, taken_s=0.1)
    assert watched.breakers.open == []
    await watched.leave_unanswered(method)
    assert watched.breakers.open == ["replica-0"]
    num_calls = len(watched.serve.calls)
    with pytest.raises(StageSilentError, match="none of 1 replicas answers"):
        watched.station.call(method)
    assert len(watched.serve.calls) == num_calls
    watched.station.call(method, needed=True)
    assert len(watched.serve.calls) == num_calls + 1


@pytest.mark.parametrize("method", ["make", "append"])
async def test_any_answer_of_a_replica_closes_its_breaker(method: str) -> None:
    watched = Watched()
    await watched.leave_unanswered(method)
    call = watched.station.call(method, needed=True)
    watched.serve.last.choose("replica-0")
    watched.serve.last.put(1)
    await call.ready()
    await settle()
    assert watched.breakers.open == []
    assert call.patience_s == math.inf
    call.cancel()
    assert watched.breakers.open == []


@pytest.mark.parametrize(("error", "is_open"), [(StoreUnavailableError("down"), False), (ActorDiedError(), True)])
async def test_an_error_of_the_replica_is_an_answer_and_a_broken_way_is_none(error: Exception, is_open: bool) -> None:
    watched = Watched()
    await watched.leave_unanswered("append")
    call = watched.station.call("append", needed=True)
    watched.serve.last.choose("replica-0")
    watched.serve.last.fail(error)
    await call.failure()
    assert bool(watched.breakers.open) == is_open


async def test_what_a_fetched_reference_says_of_its_replica() -> None:
    watched = Watched()
    await watched.leave_unanswered("make")
    call = watched.station.call("make", needed=True)
    watched.serve.last.choose("replica-0")
    watched.serve.last.put("tensor")
    assert await call == "tensor"
    assert watched.breakers.open == []


async def test_a_copy_of_a_call_that_changes_nothing_tries_the_silent_replica() -> None:
    watched = Watched()
    await watched.leave_unanswered("append")
    await watched.clock.advance(0.6)
    with pytest.raises(StageSilentError):
        watched.station.call("append", 1)
    assert len(watched.serve.calls) == 1, "an append is not copied"
    for _ in range(3):
        with pytest.raises(StageSilentError):
            watched.station.call("lookup", 2)
    (_, response) = watched.serve.calls[-1]
    assert len(watched.serve.calls) == 2, "one copy, and no call"
    assert response.args == (2,)
    assert response._trip is not None
    assert response._trip.only == "replica-0"
    response.choose("replica-0")
    response.put("rows")
    await settle()
    assert watched.breakers.open == []
    await watched.clock.advance(1.0)


async def test_a_copy_that_is_not_answered_is_given_up_at_the_limit() -> None:
    watched = Watched()
    await watched.leave_unanswered("append")
    await watched.clock.advance(0.6)
    with pytest.raises(StageSilentError):
        watched.station.call("lookup")
    watched.serve.last.choose("replica-0")
    await watched.clock.advance(0.3)
    await settle()
    assert watched.serve.last.was_stopped
    assert watched.breakers.open == ["replica-0"]


@pytest.mark.parametrize("method", ["lookup", "encode"])
async def test_the_call_that_opens_a_breaker_goes_on_and_its_answer_closes_it(method: str) -> None:
    """By value and by reference: a station that had no processor answers what it was asked as soon as it has one."""
    watched = Watched()
    call = watched.station.call(method, needed=True)
    response = watched.serve.last
    response.choose("replica-0")
    await watched.clock.advance(0.3)
    for _ in range(2):  # the leg that is dropped, and the request at its end
        call.cancel()
    await settle()
    assert watched.breakers.open == ["replica-0"]
    assert not response.was_stopped
    response.put("rows")
    await settle()
    assert watched.breakers.open == []
    watched.station.call(method)
    await watched.clock.advance(1.0)


async def test_the_call_that_opens_a_breaker_is_stopped_at_the_limit() -> None:
    watched = Watched()
    await watched.leave_unanswered("lookup")
    stopped = [watched.serve.last.was_stopped]
    await watched.clock.advance(0.3)
    await settle()
    assert [*stopped, watched.serve.last.was_stopped] == [False, True]
    assert watched.breakers.open == ["replica-0"]


async def copied_by_reference() -> Watched:
    """Return a station whose silent replica has a copy of a call."""
    watched = Watched()
    await watched.leave_unanswered("append")
    await watched.clock.advance(0.6)
    with pytest.raises(StageSilentError):
        watched.station.call("encode", 2)
    watched.serve.last.choose("replica-0")
    return watched


async def test_a_copy_by_reference_closes_the_breaker_too() -> None:
    watched = await copied_by_reference()
    watched.serve.last.put("state")
    await settle()
    await settle()
    assert watched.breakers.open == []
    await watched.clock.advance(1.0)


@pytest.mark.parametrize("method", ["lookup", "encode"])
async def test_a_left_call_whose_replica_dies_closes_no_breaker(method: str) -> None:
    watched = Watched()
    await watched.leave_unanswered(method)
    watched.serve.last.fail(ActorDiedError())
    await settle()
    assert watched.breakers.open == ["replica-0"]


async def test_a_copy_by_reference_whose_replica_dies_closes_no_breaker() -> None:
    watched = await copied_by_reference()
    watched.serve.last.fail(ActorDiedError())
    await settle()
    assert watched.breakers.open == ["replica-0"]
    await watched.clock.advance(1.0)


async def test_a_large_answer_of_a_left_call_closes_the_breaker_unfetched() -> None:
    watched = Watched()
    watched.station = handle(watched.serve, "embedding:0", ERROR_BYTES_MAX + 1, watched.breakers)
    await watched.leave_unanswered("encode")
    watched.serve.last.put("tensor")
    await settle()
    assert watched.breakers.open == []
    assert watched.serve.last.reference.num_fetches == 0
