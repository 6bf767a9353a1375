"""One thread that runs a replica's heavy work, so that its event loop stays free.

A network pass takes milliseconds; on the loop it would hold up health checks, cancellations and the next call's
bookkeeping. The hop to a thread and back costs about 0.1 ms, so work that is shorter than that (id look-ups, table
gathers) stays on the loop. One thread, because torch already spreads one pass over the replica's cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from shared.clock import Clock, SystemClock
from shared.deadline import Deadline
from shared.errors import OverloadedError, StageUnavailableError

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class Checkpoint:
    """Where work stops whose result nobody waits for: called between its steps, it raises then.

    Args:
        deadline: Of the request.
        station: Deployment name, for messages.
    """

    __slots__ = ("_deadline", "_is_abandoned", "_station")

    def __init__(self, deadline: Deadline, station: str) -> None:
        self._deadline = deadline
        self._station = station
        self._is_abandoned = False

    def abandon(self) -> None:
        """Say that nobody waits any more; from any thread."""
        self._is_abandoned = True

    def __call__(self) -> None:
        """Go on, or end the work.

        Raises:
            StageUnavailableError: the call was cancelled; nobody sees it.
            DeadlineExceededError: the deadline has passed.
        """
        if self._is_abandoned:
            raise StageUnavailableError(f"{self._station}: the call was cancelled", stage=self._station)
        self._deadline.check(self._station)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How much a worker has done, and has to do.

    Args:
        busy_s: Time for which its thread has worked since it was made, seconds; what runs now counts up to now.
        num_ended: Pieces of work that ran to an end.
        num_waiting: Pieces that wait for those before them.
    """

    busy_s: float
    num_ended: int
    num_waiting: int


class Worker:
    """Runs pieces of work one at a time, in order of arrival.

    Work that is cancelled, or whose deadline passes, while it waits never starts. Work that has started runs to its
    end, or to its next checkpoint (``run_in_steps``) once nobody waits any more; its result is dropped then.

    Args:
        station: Deployment name, for messages and the thread's name.
        queue_max: Pieces that may wait or run at once.
        retry_after_s: What an overloaded caller is told to wait, seconds.
        executor: Runs the work, in order; None: a thread of its own.
        clock: Measures how long the thread works; None: the machine's.
    """

    def __init__(
        self,
        station: str,
        queue_max: int,
        retry_after_s: float = 1.0,
        executor: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._station = station
        self._queue_max = queue_max
        self._retry_after_s = retry_after_s
        self._num_held = 0
        self._clock = clock or SystemClock()
        # Written by the thread, read by anybody: one name holds it all, so that no reader sees half of a change.
        self._done: tuple[float, int, float | None] = 0.0, 0, None
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix=station)

    @property
    def num_held(self) -> int:
        """Pieces of work that wait or run now."""
        return self._num_held

    def load(self) -> WorkerLoad:
        """Return how much it has done, and has to do."""
        busy_s, num_ended, since_s = self._done
        if since_s is None:
            return WorkerLoad(busy_s, num_ended, self._num_held)
        busy_s += max(self._clock.monotonic_s() - since_s, 0.0)
        return WorkerLoad(busy_s, num_ended, max(self._num_held - 1, 0))

    async def run(self, deadline: Deadline, work: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Run ``work`` on the thread and return its result.

        Raises:
            DeadlineExceededError: the deadline passed before the work started.
            OverloadedError: ``queue_max`` pieces are held already.
        """
        deadline.check(self._station)
        if self._num_held >= self._queue_max:
            raise OverloadedError(
                f"{self._station} holds {self._num_held} pieces of work, limit {self._queue_max}",
                stage=self._station, limit=self._queue_max, value=self._num_held, retry_after_s=self._retry_after_s,
            )  # fmt: skip

        def start() -> ResultT:
            deadline.check(self._station)
            busy_s, num_ended, _ = self._done
            since_s = self._clock.monotonic_s()
            self._done = busy_s, num_ended, since_s
            try:
                return work(*args, **kwargs)
            finally:
                self._done = busy_s + self._clock.monotonic_s() - since_s, num_ended + 1, None

        self._num_held += 1
        loop = asyncio.get_running_loop()
        future = self._executor.submit(start)
        future.add_done_callback(lambda done: _on_loop(loop, self._release, done))
        # Cancelling the wrapped future cancels this one, and the executor drops a cancelled future that waits.
        return await asyncio.wrap_future(future)

    async def run_in_steps(
        self, deadline: Deadline, work: Callable[Concatenate[Checkpoint, P], ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """Run ``work`` on the thread; it is given a checkpoint, to be called between its steps.

        Raises:
            DeadlineExceededError: the deadline passed before the work started, or between two steps.
            OverloadedError: ``queue_max`` pieces are held already.
        """
        checkpoint = Checkpoint(deadline, self._station)
        try:
            return await self.run(deadline, work, checkpoint, *args, **kwargs)
        except asyncio.CancelledError:
            checkpoint.abandon()
            raise

    def close(self) -> None:
        """Drop what waits and let the thread end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self, _: Future[ResultT]) -> None:
        self._num_held -= 1


def _on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[Future[ResultT]], None], done: Future[ResultT]
) -> None:
    if not loop.is_closed():  # a test's or a stopping replica's loop may be gone before the thread is
        loop.call_soon_threadsafe(callback, done)
