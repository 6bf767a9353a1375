"""An event loop whose time jumps to the next timer as soon as nothing is ready: seconds take microseconds.

No thread, socket or real clock takes part, so a run depends on nothing but its seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

from shared.errors import RankMeshError

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

TURNS_MAX = 200_000
"""Turns of the loop in one world; usual are some thousands."""


class StuckError(Exception):
    """Nothing is ready and no timer runs, or the loop turns without an end: the world will never finish."""


class _Jump:
    """Stands where a loop waits for sockets: moves time instead."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._num_turns = 0

    def select(self, timeout_s: float | None) -> tuple[()]:
        self._num_turns += 1
        if self._num_turns > TURNS_MAX:
            raise StuckError(f"the loop has turned {TURNS_MAX} times")
        if timeout_s is None:
            raise StuckError("nothing is ready and no timer runs")
        self._loop.now_s += timeout_s
        return ()


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop.

    Attributes:
        now_s: Simulated seconds since the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _Jump(self)

    def time(self) -> float:
        """Return simulated seconds."""
        return self.now_s

    def drop_tasks(self) -> None:
        """Cancel what is left; a few turns for what catches its cancellation, then it is dropped."""
        self._selector = _Jump(self)
        for task in asyncio.all_tasks(self):
            task.cancel()
        for _ in range(20):
            self.call_soon(self.stop)
            self.run_forever()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*ArgTs], ResultT], *args: *ArgTs
    ) -> asyncio.Future[ResultT]:
        """Run blocking work at once, its time is not what is simulated; or by a simulated worker."""
        if isinstance(executor, LoopExecutor):
            return asyncio.wrap_future(executor.submit(func, *args), loop=self)
        future: asyncio.Future[ResultT] = self.create_future()
        future.set_result(func(*args))  # what it raises, it raises where its caller waits
        return future

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a system call."""


class LoopExecutor(Executor):
    """One worker of a simulated loop: takes pieces of work in order, each for as long as it is told.

    Args:
        loop: The loop.
        duration_s: Returns how long the next piece takes, seconds.
    """

    def __init__(self, loop: SimulatedLoop, duration_s: Callable[[], float]) -> None:
        self._loop = loop
        self._duration_s = duration_s
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._is_busy = False
        self._is_closed = False

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Queue a piece of work."""
        future: Future[ResultT] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; what waits is dropped."""
        self._is_closed = True
        for future, _ in self._waiting:
            future.cancel()
        self._waiting.clear()

    def _next(self) -> None:
        while self._waiting and not self._is_busy and not self._is_closed:
            future, work = self._waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result, error = work(), None
            except RankMeshError as raised:
                result, error = None, raised
            self._is_busy = True
            self._loop.call_later(self._duration_s(), self._end, future, result, error)

    def _end(self, future: Future[Any], result: Any, error: Exception | None) -> None:
        self._is_busy = False
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        self._next()


def run_simulated(main: Callable[[SimulatedLoop], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run a coroutine on a loop of its own to its end, and drop what it leaves.

    Args:
        main: Given the loop, makes the coroutine.

    Raises:
        StuckError: it would never end.
    """
    loop = SimulatedLoop()
    loop.set_exception_handler(lambda *_: None)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.drop_tasks()
        loop.close()
