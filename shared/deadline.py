"""A request's time budget, carried by value from station to station.

Processes do not share a monotonic clock, so what travels is the budget that remains (``Deadline.to_wire_ms``),
and each process starts its own count from there. The time on the wire between two stations is not counted by the
callee; the ingress, which waits for the answer, counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from shared.clock import Clock
from shared.errors import DeadlineExceededError

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on one process's monotonic clock by which the answer must be out.

    Args:
        at_s: Monotonic seconds of ``clock`` at which the budget ends.
        budget_ms: The whole budget the request came with, milliseconds.
        clock: The clock that ``at_s`` belongs to.
    """

    at_s: float
    budget_ms: float
    clock: Clock

    @classmethod
    def after_ms(cls, budget_ms: float, clock: Clock) -> Deadline:
        """Start a budget of ``budget_ms`` milliseconds now."""
        return cls(clock.monotonic_s() + budget_ms / 1e3, budget_ms, clock)

    def remaining_ms(self) -> float:
        """Return the milliseconds left, negative when the deadline has passed."""
        return (self.at_s - self.clock.monotonic_s()) * 1e3

    def to_wire_ms(self) -> float:
        """Return the remaining budget to hand to a callee, milliseconds, at least 0."""
        return max(self.remaining_ms(), 0.0)

    def share(self, reserve_ms: float) -> Deadline:
        """Return an earlier deadline that leaves ``reserve_ms`` milliseconds for what comes after."""
        return Deadline(self.at_s - reserve_ms / 1e3, self.budget_ms, self.clock)

    def check(self, stage: str) -> None:
        """Raise when the budget is gone.

        Raises:
            DeadlineExceededError: names the stage and the budget.
        """
        if self.remaining_ms() <= 0:
            raise self.error(stage)

    def error(self, stage: str) -> DeadlineExceededError:
        """Build the error that says in which stage the budget of this request ran out."""
        return DeadlineExceededError(
            f"deadline of {self.budget_ms:.0f} ms passed in {stage}", stage=stage, deadline_ms=self.budget_ms
        )

    async def run(self, work: Awaitable[ResultT], stage: str) -> ResultT:
        """Await ``work`` for at most the remaining time; cancel it when the time is up, and wait until it has ended.

        Raises:
            DeadlineExceededError: when the time ran out first.
        """
        # Not ``asyncio.timeout``: that counts on the loop's clock, whichever clock this deadline belongs to, and gives
        # the same TimeoutError as a socket of the work whose time ran out while the request has some left.
        task = asyncio.ensure_future(work)
        timer = asyncio.ensure_future(self.clock.sleep_s(self.to_wire_ms() / 1e3))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            is_late = not task.done()
            if is_late:
                task.cancel()
                await asyncio.wait({task})
        if is_late and task.cancelled():
            raise self.error(stage)
        return task.result()
