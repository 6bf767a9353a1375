"""Calls inside one process behave as calls of the mesh do."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from shared.errors import OverloadedError, StageUnavailableError
from shared.handle import LocalHandle


class Station:
    """Adds numbers, fails, or waits."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.seen: list[object] = []
        self.cancelled = 0

    async def add(self, *numbers: int | None) -> int:
        self.seen.extend(numbers)
        return sum(number or 0 for number in numbers)

    async def wait(self) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "done"

    async def shed(self) -> None:
        raise OverloadedError("full", retry_after_s=1)

    async def crash(self) -> None:
        raise ZeroDivisionError("a bug")


@pytest.fixture
def station() -> Station:
    return Station()


@pytest.fixture
def handle(station: Station) -> LocalHandle:
    return LocalHandle("station", station)


async def test_a_call_starts_at_once_and_can_be_awaited_twice(handle: LocalHandle, station: Station) -> None:
    call = handle.call("add", 1, 2)
    await asyncio.sleep(0)
    assert station.seen == [1, 2]
    assert await call == 3
    assert await call == 3
    assert await call.failure() is None
    assert handle.name == "station"


async def test_a_pending_result_is_passed_on_unawaited(handle: LocalHandle, station: Station) -> None:
    slow = handle.call("wait")
    call = handle.call("add", handle.call("add", 1, 2), None, handle.call("add", handle.call("add", 4)))
    assert await call == 7
    assert not slow._task.done()
    slow.cancel()


async def test_ready_does_not_need_the_value(handle: LocalHandle, station: Station) -> None:
    call = handle.call("wait")
    ready = asyncio.create_task(call.ready())
    await asyncio.sleep(0)
    assert not ready.done()
    station.gate.set()
    await ready
    assert await call == "done"
    await handle.call("shed").ready()  # a failed call is ready too


async def test_a_failure_is_raised_and_can_be_asked_for(handle: LocalHandle) -> None:
    call = handle.call("shed")
    assert isinstance(await call.failure(), OverloadedError)
    for _ in range(2):
        with pytest.raises(OverloadedError):
            await call


async def test_a_failed_argument_fails_the_call(handle: LocalHandle, station: Station) -> None:
    call = handle.call("add", 1, handle.call("shed"))
    assert isinstance(await call.failure(), OverloadedError)
    assert station.seen == []


async def test_a_bug_in_a_station_is_a_station_that_failed(handle: LocalHandle) -> None:
    call = handle.call("crash")
    with pytest.raises(StageUnavailableError, match="ZeroDivisionError: a bug") as caught:
        await call
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    error = await call.failure()
    assert isinstance(error, StageUnavailableError)


async def test_a_cancelled_call_is_a_failure_not_a_cancelled_caller(handle: LocalHandle, station: Station) -> None:
    """Else a caller takes the end of a call for its own end, and leaves without an answer."""
    call = handle.call("wait")
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(StageUnavailableError, match="cancelled"):
        await call
    assert isinstance(await call.failure(), StageUnavailableError)
    assert station.cancelled == 1
    call.cancel()  # harmless


async def test_a_call_on_a_cancelled_argument_fails(handle: LocalHandle) -> None:
    argument = handle.call("wait")
    call = handle.call("add", argument)
    await asyncio.sleep(0)
    argument.cancel()
    with pytest.raises(StageUnavailableError, match="cancelled"):
        await call


async def test_cancelling_one_caller_leaves_the_call_to_the_others(handle: LocalHandle, station: Station) -> None:
    call = handle.call("wait")

    async def caller() -> object:
        return await call

    first, second = asyncio.create_task(caller()), asyncio.create_task(caller())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    assert first.cancelled()
    station.gate.set()
    assert await second == "done"
    assert station.cancelled == 0


async def test_cancelling_a_call_leaves_its_arguments_to_other_calls(handle: LocalHandle, station: Station) -> None:
    shared_argument = handle.call("wait")
    first, second = handle.call("add", shared_argument), handle.call("wait")
    await asyncio.sleep(0)
    first.cancel()
    station.gate.set()
    assert await shared_argument == "done"
    assert await second == "done"


async def test_a_failure_nobody_asks_for_is_not_reported(handle: LocalHandle) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    call = handle.call("shed")
    await call.ready()
    del call
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []
