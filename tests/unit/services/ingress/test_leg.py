from __future__ import annotations

import asyncio

import pytest

from services.ingress.leg import Leg, all_ended, wait_until
from shared.clock import ManualClock
from shared.errors import StageUnavailableError
from shared.handle import LocalHandle


class Station:
    """Answers, breaks in its own way, or waits."""

    async def well(self) -> int:
        return 7

    async def broken(self) -> int:
        return 1 // 0

    async def waits(self) -> None:
        await asyncio.Event().wait()


HANDLE = LocalHandle("station", Station())


async def test_a_leg_keeps_the_value_only_when_it_was_asked_to() -> None:
    clock = ManualClock()
    kept, left = Leg("a", HANDLE.call("well"), clock, fetch=True), Leg("b", HANDLE.call("well"), clock)
    await all_ended([kept, left], clock.monotonic_s() + 1, clock)

    assert (kept.value, left.value) == (7, None)
    assert kept.ended
    assert left.ended


async def test_an_error_outside_the_tree_becomes_one_of_the_tree() -> None:
    clock = ManualClock()
    leg = Leg("a", HANDLE.call("broken"), clock, fetch=True)
    await all_ended([leg], clock.monotonic_s() + 1, clock)

    assert isinstance(leg.error, StageUnavailableError)
    assert "ZeroDivisionError" in leg.error.message


async def test_waiting_ends_at_its_time_and_cancels_nothing() -> None:
    clock = ManualClock()
    leg = Leg("a", HANDLE.call("waits"), clock)
    waiting = asyncio.create_task(all_ended([leg], clock.monotonic_s() + 0.5, clock))
    await clock.advance(0.499)
    assert not waiting.done()
    await clock.advance(0.001)

    assert waiting.done()
    assert not leg.ended
    assert not leg.watcher.done()
    leg.cancel()


async def test_waiting_for_the_first_returns_with_it() -> None:
    clock = ManualClock()
    legs = [Leg("a", HANDLE.call("waits"), clock), Leg("b", HANDLE.call("well"), clock)]
    await wait_until([leg.watcher for leg in legs], clock.monotonic_s() + 1, clock, first=True)

    assert [leg.ended for leg in legs] == [False, True]
    legs[0].cancel()


async def test_a_station_that_cannot_say_why_it_failed_has_failed() -> None:
    clock = ManualClock()
    leg = Leg("embedding:1", HANDLE.call("waits"), clock)
    asking = asyncio.create_task(leg.failure(clock.monotonic_s() + 0.1))
    await clock.advance(0.1)

    error = await asking
    assert isinstance(error, StageUnavailableError)
    assert error.context == {"stage": "embedding:1"}
    leg.cancel()


@pytest.mark.parametrize(("method", "is_sound"), [("well", True), ("broken", False)])
async def test_a_leg_knows_whether_it_is_sound_once_it_was_asked(method: str, is_sound: bool) -> None:
    clock = ManualClock()
    leg = Leg("a", HANDLE.call(method), clock)
    error = await leg.failure(clock.monotonic_s() + 1)

    assert (error is None) == leg.is_sound == is_sound
