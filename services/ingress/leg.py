"""A leg: one call that a request holds, with its timing and its fate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from shared.clock import Clock
from shared.errors import RankMeshError, StageUnavailableError
from shared.handle import Call, Handle

LOOK_S_MIN, LOOK_S = 0.002, 0.025
"""How often is looked whether waiting has come to be in vain; most calls are over before the second time."""

_SLACK_S = 1e-6  # a clock's rounding must not turn "at the limit" into "just before it, wait once more"


class Leg:
    """One call to one station, watched until it ends.

    Args:
        name: Station, e.g. ``embedding:1``.
        call: The pending result.
        clock: Clock of the timings.
        fetch: Whether the value comes into this process (small answers only).
    """

    def __init__(self, name: str, call: Call[Any], clock: Clock, *, fetch: bool = False) -> None:
        self.name = name
        self.call = call
        self.retried = False
        self.hedge: Call[Any] | None = None
        self.hedge_won = False
        self.is_sound = False  # known to have a value; asking costs a fetch, so it is asked once
        self.started_s = clock.monotonic_s()
        self.ended_s: float | None = None
        self.value: Any = None
        self.error: RankMeshError | None = None
        self._clock = clock
        self.watcher = asyncio.get_running_loop().create_task(self._watch(fetch), name=f"watch {name}")

    @classmethod
    def start(cls, handle: Handle, method: str, *args: object, clock: Clock, fetch: bool = False) -> Leg:
        """Call ``method`` of a station and watch the call."""
        return cls(handle.name, handle.call(method, *args), clock, fetch=fetch)

    @property
    def ended(self) -> bool:
        """Whether the call has ended, well or not."""
        return self.ended_s is not None

    @property
    def patience_s(self) -> float:
        """Seconds until waiting for it is in vain; for both calls when it is hedged."""
        return max(call.patience_s for call in (self.call, self.hedge) if call is not None)

    async def failure(self, until_s: float) -> RankMeshError | None:
        """Return why the call failed, or None; a station that cannot even say so by ``until_s`` has failed."""
        asking = asyncio.ensure_future(self.call.failure())
        try:
            await wait_until([asking], until_s, self._clock)
            if asking.done():
                error: RankMeshError | None = asking.result()
                self.is_sound = error is None
                return error
            return StageUnavailableError(f"{self.name} did not answer", stage=self.name)
        finally:
            asking.cancel()

    def start_hedge(self, call: Call[Any]) -> None:
        """Let a second call run beside the first: the leg ends with the one that ends first, and cancels the other."""
        self.hedge = call
        self.watcher.cancel()
        self.watcher = asyncio.get_running_loop().create_task(self._race(call), name=f"watch {self.name} twice")

    def cancel(self) -> None:
        """Stop the calls that run, and the watch over them."""
        if not self.ended:
            self.call.cancel()
            if self.hedge is not None:
                self.hedge.cancel()
        self.watcher.cancel()

    async def _watch(self, fetch: bool) -> None:
        try:
            if fetch:
                self.value = await self.call
            else:
                await self.call.ready()
        except RankMeshError as error:
            self.error = error
        self.ended_s = self._clock.monotonic_s()

    async def _race(self, hedge: Call[Any]) -> None:
        loop = asyncio.get_running_loop()
        first, second = (loop.create_task(call.ready()) for call in (self.call, hedge))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            self.hedge_won = not first.done()
            loser = self.call if self.hedge_won else hedge
            loser.cancel()
            self.call = hedge if self.hedge_won else self.call
            self.ended_s = self._clock.monotonic_s()
        finally:
            first.cancel()
            second.cancel()


async def wait_until(
    tasks: Iterable[asyncio.Future[Any]], until_s: float, clock: Clock, *, first: bool = False
) -> None:
    """Wait for tasks, but not past a point in time.

    Args:
        tasks: What to wait for; none is cancelled here.
        until_s: Monotonic seconds of ``clock`` at which waiting ends.
        clock: The clock.
        first: Return as soon as one task ends instead of all.
    """
    pending = {task for task in tasks if not task.done()}
    if not pending:
        return
    timer = asyncio.get_running_loop().create_task(clock.sleep_s(until_s - clock.monotonic_s()))
    try:
        while pending and not timer.done():
            done, _ = await asyncio.wait({*pending, timer}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if first and done:
                return
    finally:
        timer.cancel()


async def all_ended(legs: Iterable[Leg], until_s: float, clock: Clock) -> None:
    """Wait until every leg has ended, but not past ``until_s``."""
    await wait_until([leg.watcher for leg in legs], until_s, clock)


def is_past(at_s: float, clock: Clock) -> bool:
    """Return whether the clock has reached ``at_s``."""
    return clock.monotonic_s() >= at_s - _SLACK_S
