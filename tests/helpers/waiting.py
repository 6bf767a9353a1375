"""Waiting for something to become true, with a limit: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shared.clock import ManualClock

ResultT = TypeVar("ResultT")

LIMIT_S = 10.0
_TURN_S = 0.001
_STEP_S = 0.005


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return once ``condition`` holds; work on other threads goes on meanwhile.

    Raises:
        AssertionError: it does not hold after ``limit_s`` seconds.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while not condition():
        assert loop.time() < end_s, f"did not become true within {limit_s} s"
        await asyncio.sleep(_TURN_S)


async def as_time_passes(clock: ManualClock, work: Coroutine[Any, Any, ResultT], limit_s: float = 1.0) -> ResultT:
    """Return the result of ``work`` while the clock moves on by small steps, up to ``limit_s`` of its seconds.

    Raises:
        AssertionError: it has not ended by then.
    """
    task = asyncio.ensure_future(work)
    await clock.advance(0)
    for _ in range(round(limit_s / _STEP_S)):
        if task.done():
            break
        await clock.advance(_STEP_S)
        await asyncio.sleep(_TURN_S)  # threads of the work run meanwhile
    assert task.done(), f"did not end within {limit_s} s"
    return task.result()
