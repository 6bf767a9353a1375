"""Waiting for something to become true, with a limit: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 10.0
_TURN_S = 0.001


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
