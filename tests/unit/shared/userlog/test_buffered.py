"""Appends while the store is down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shared.clock import ManualClock
from shared.errors import InvalidRequestError, StoreUnavailableError
from shared.schema.api import Event
from shared.userlog import AppendResult, BufferConfig, BufferedUserLog, MemoryUserLog, UserLoad

MakeEvent = Callable[..., Event]

LATER = 2**40


class WatchedLog(MemoryUserLog):
    """Counts appends and can stop one midway."""

    def __init__(self) -> None:
        super().__init__(max_events=100)
        self.batches: list[int] = []
        self.gate: asyncio.Event | None = None

    async def append(self, events: Sequence[Event]) -> AppendResult:
        self.batches.append(len(events))
        if self.gate is not None:
            await self.gate.wait()
        return await super().append(events)


@pytest.fixture
def inner() -> WatchedLog:
    return WatchedLog()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(inner: WatchedLog, clock: ManualClock) -> BufferedUserLog:
    return BufferedUserLog(inner, BufferConfig(events_max=5, flush_events_max=2, retry_interval_ms=100), clock)


async def items(log: BufferedUserLog) -> list[int]:
    return [int(key) for key in (await log.read(1, LATER, 100)).item_keys]


async def test_nothing_is_buffered_while_the_store_is_up(log: BufferedUserLog, event: MakeEvent) -> None:
    assert await log.append([event("a", 1, item=1)]) == AppendResult(appended=1)
    assert log.num_buffered == 0
    assert await items(log) == [1]


async def test_events_wait_and_are_written_in_order(
    log: BufferedUserLog, inner: WatchedLog, clock: ManualClock, event: MakeEvent
) -> None:
    inner.down = True
    assert await log.append([event("a", 1, item=1), event("b", 1, item=2)]) == AppendResult(buffered=2)
    inner.down = False
    # The store is back, but later events must not overtake those that wait.
    assert await log.append([event("c", 1, item=3)]) == AppendResult(buffered=1)
    assert log.num_buffered == 3
    assert await items(log) == []
    await clock.advance(0.1)
    assert log.num_buffered == 0
    assert await items(log) == [1, 2, 3]
    assert inner.batches == [2, 2, 1]  # the failed one, then two at a time
    assert await log.append([event("d", 1, item=4)]) == AppendResult(appended=1)


async def test_an_event_that_the_log_would_refuse_is_not_buffered(
    log: BufferedUserLog, inner: WatchedLog, clock: ManualClock, event: MakeEvent
) -> None:
    """It would never be written, and hold up everything behind it."""
    inner.down = True
    await log.append([event("a", 1, item=1)])
    with pytest.raises(InvalidRequestError, match=r"events\.1\.source must be one of"):
        await log.append([event("b", 2, item=2), event("c", 3, source="nowhere")])
    assert log.num_buffered == 1
    inner.down = False
    await clock.advance(0.1)
    assert await items(log) == [1]


async def test_it_keeps_trying(log: BufferedUserLog, inner: WatchedLog, clock: ManualClock, event: MakeEvent) -> None:
    inner.down = True
    await log.append([event("a", 1, item=1)])
    await clock.advance(1.0)
    assert log.num_buffered == 1
    assert len(inner.batches) == 11
    inner.down = False
    await clock.advance(0.1)
    assert await items(log) == [1]
    await clock.advance(1.0)
    assert len(inner.batches) == 12  # nothing waits: nobody tries


async def test_a_second_outage_buffers_again(
    log: BufferedUserLog, inner: WatchedLog, clock: ManualClock, event: MakeEvent
) -> None:
    for number in range(2):
        inner.down = True
        assert (await log.append([event(f"e{number}", number, item=number)])).buffered == 1
        inner.down = False
        await clock.advance(0.1)
    assert await items(log) == [0, 1]


async def test_the_bound_and_one_over(log: BufferedUserLog, inner: WatchedLog, event: MakeEvent) -> None:
    inner.down = True
    assert (await log.append([event(f"e{n}", n) for n in range(4)])).buffered == 4
    with pytest.raises(StoreUnavailableError, match="holds 4 of 5 events: no room for 2 more") as caught:
        await log.append([event("x", 1), event("y", 1)])
    assert caught.value.context == {"limit": 5, "value": 6}
    assert log.num_buffered == 4  # all or none
    assert (await log.append([event("z", 1)])).buffered == 1
    with pytest.raises(StoreUnavailableError):
        await log.append([event("w", 1)])
    inner.down = False
    assert await log.flush() == AppendResult(appended=5)


async def test_a_first_batch_over_the_bound_says_why(log: BufferedUserLog, inner: WatchedLog, event: MakeEvent) -> None:
    inner.down = True
    with pytest.raises(StoreUnavailableError, match="no room for 6 more") as caught:
        await log.append([event(f"e{n}", n) for n in range(6)])
    assert isinstance(caught.value.__cause__, StoreUnavailableError)
    assert log.num_buffered == 0


async def test_a_cancelled_flush_loses_nothing(log: BufferedUserLog, inner: WatchedLog, event: MakeEvent) -> None:
    inner.down = True
    await log.append([event(f"e{n}", n, item=n) for n in range(3)])
    inner.down = False
    inner.gate = asyncio.Event()
    flush = asyncio.create_task(log.flush())
    await asyncio.sleep(0)
    flush.cancel()
    await asyncio.wait({flush})
    assert log.num_buffered == 3
    inner.gate.set()
    assert await log.flush() == AppendResult(appended=3)
    assert await items(log) == [0, 1, 2]


async def test_events_that_come_during_a_flush_stay_behind(
    log: BufferedUserLog, inner: WatchedLog, event: MakeEvent
) -> None:
    inner.down = True
    await log.append([event(f"e{n}", 1, item=n) for n in range(3)])
    inner.down = False
    inner.gate = asyncio.Event()
    flush = asyncio.create_task(log.flush())
    await asyncio.sleep(0)
    assert (await log.append([event("late", 1, item=9)])).buffered == 1
    inner.gate.set()
    assert await flush == AppendResult(appended=4)
    assert await items(log) == [0, 1, 2, 9]


async def test_deleting_a_user_also_drops_what_waits(log: BufferedUserLog, inner: WatchedLog, event: MakeEvent) -> None:
    inner.down = True
    await log.append([event("a", 1, user="1"), event("b", 1, user=2, item=5)])
    inner.down = False
    assert await log.delete(1)
    assert not await log.delete(1)
    assert await log.flush() == AppendResult(appended=1)
    assert await items(log) == []
    assert (await log.read(2, LATER, 5)).item_keys.tolist() == [5]


async def test_close_writes_what_it_can(
    log: BufferedUserLog, inner: WatchedLog, clock: ManualClock, event: MakeEvent
) -> None:
    inner.down = True
    await log.append([event("a", 1, item=1)])
    inner.down = False
    await log.aclose()
    assert await items(log) == [1]
    await clock.advance(1.0)
    assert len(inner.batches) == 2  # the background task has ended


async def test_close_counts_what_is_lost(log: BufferedUserLog, inner: WatchedLog, event: MakeEvent) -> None:
    inner.down = True
    await log.append([event("a", 1), event("b", 2)])
    with pytest.raises(StoreUnavailableError, match="2 buffered events were lost") as caught:
        await log.aclose()
    assert caught.value.context == {"num_lost": 2}


async def test_everything_else_goes_straight_to_the_store(log: BufferedUserLog, inner: WatchedLog) -> None:
    load = UserLoad(1, np.array([4]), np.ones(1, np.float32), np.array([1]), [1], {"a": "b"})
    assert await log.load_many([load]) == AppendResult(appended=1)
    assert (await log.read(1, LATER, 5)).profile == {"a": "b"}
    await log.check()
    inner.down = True
    for call in (log.load_many([load]), log.read(1, LATER, 5), log.check(), log.delete(1)):
        with pytest.raises(StoreUnavailableError):
            await call
