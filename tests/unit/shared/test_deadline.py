"""A request's budget."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from shared.clock import ManualClock, SystemClock
from shared.deadline import Deadline
from shared.errors import DeadlineExceededError, StoreUnavailableError


async def test_the_budget_runs_down() -> None:
    clock = ManualClock()
    deadline = Deadline.after_ms(100, clock)
    assert deadline.remaining_ms() == pytest.approx(100)
    await clock.advance(0.03)
    assert deadline.remaining_ms() == deadline.to_wire_ms() == pytest.approx(70)
    deadline.check("ranking")
    await clock.advance(0.08)
    assert deadline.remaining_ms() == pytest.approx(-10)
    assert deadline.to_wire_ms() == 0.0
    with pytest.raises(DeadlineExceededError, match="deadline of 100 ms passed in ranking") as caught:
        deadline.check("ranking")
    assert caught.value.context == {"stage": "ranking", "deadline_ms": 100}


async def test_exactly_none_left_is_too_late() -> None:
    clock = ManualClock(0.0)
    deadline = Deadline.after_ms(1_000, clock)
    await clock.advance(1.0)
    assert deadline.remaining_ms() == 0.0
    with pytest.raises(DeadlineExceededError):
        deadline.check("x")


async def test_a_share_ends_earlier_and_tells_the_whole_budget() -> None:
    clock = ManualClock()
    share = Deadline.after_ms(100, clock).share(reserve_ms=30)
    assert share.remaining_ms() == pytest.approx(70)
    await clock.advance(0.08)
    with pytest.raises(DeadlineExceededError, match="deadline of 100 ms"):
        share.check("x")


async def test_the_next_process_counts_on_from_what_is_left() -> None:
    here, there = ManualClock(5.0), ManualClock(900.0)
    deadline = Deadline.after_ms(100, here)
    await here.advance(0.04)
    assert Deadline.after_ms(deadline.to_wire_ms(), there).remaining_ms() == pytest.approx(60)


async def test_work_in_time_gives_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await Deadline.after_ms(1_000, SystemClock()).run(work(), "x") == 7
    assert await Deadline.after_ms(1_000, ManualClock()).run(work(), "x") == 7


async def test_late_work_is_cancelled_on_the_clock_it_was_given() -> None:
    """With a manual clock no real time passes: neither does the deadline, until the clock is moved."""
    clock = ManualClock()
    ended: list[str] = []

    async def work() -> None:
        try:
            await clock.sleep_s(10.0)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    run = asyncio.create_task(Deadline.after_ms(50, clock).run(work(), "encode"))
    await asyncio.sleep(0.06)
    assert not run.done()
    await clock.advance(0.049)
    assert not run.done()
    await clock.advance(0.002)
    with pytest.raises(DeadlineExceededError, match="passed in encode"):
        await run
    assert ended == ["cancelled"]


async def test_late_work_is_cancelled_on_the_machines_clock() -> None:
    with pytest.raises(DeadlineExceededError):
        await Deadline.after_ms(2, SystemClock()).run(asyncio.sleep(10), "x")


async def test_no_budget_left_still_gives_what_is_ready() -> None:
    async def ready() -> int:
        return 7

    assert await Deadline.after_ms(0, ManualClock()).run(ready(), "x") == 7
    with pytest.raises(DeadlineExceededError):
        await Deadline.after_ms(0, ManualClock()).run(asyncio.Event().wait(), "x")


async def test_a_failure_of_the_work_is_the_works_own() -> None:
    async def fail(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    deadline = Deadline.after_ms(1_000, SystemClock())
    with pytest.raises(StoreUnavailableError):
        await deadline.run(fail(StoreUnavailableError("down")), "x")
    # A timeout inside, of a socket for instance, is not this deadline: there is time left.
    with pytest.raises(TimeoutError, match="socket"):
        await deadline.run(fail(TimeoutError("socket")), "x")


async def test_cancelling_the_caller_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    run = asyncio.create_task(Deadline.after_ms(1_000, SystemClock()).run(work(), "x"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
    assert run.cancelled()
    assert ended.is_set()  # not some time later: its clean-up is over
