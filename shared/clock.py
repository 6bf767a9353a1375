"""The only door to time: wall clock, monotonic clock and sleep.

Services take a ``Clock``; tests and the simulator give them a ``ManualClock`` and move it by hand.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import mmap
import os
import time
from array import array
from functools import cache
from pathlib import Path
from typing import Protocol


def processor_s() -> float:
    """Return the processor seconds that this process has used, on all its threads; only differences mean anything."""
    return time.process_time()


async def give_way() -> None:
    """Let everything run first that the event loop has ready: between two parts of long work."""
    await asyncio.sleep(0)


class Clock(Protocol):
    """Time as the services see it."""

    def now_s(self) -> float:
        """Return wall-clock seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds of a clock that never goes back; only differences mean anything."""
        ...

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the caller for ``duration_s`` seconds (0 or less: yield once)."""
        ...


class SystemClock:
    """The machine's clock; in a trial its wall clock may be wrong (``open_skew``)."""

    __slots__ = ()

    def now_s(self) -> float:
        """Return wall-clock seconds since the epoch."""
        skew = _own_skew()
        return time.time() if skew is None else time.time() + skew[0]

    def monotonic_s(self) -> float:
        """Return the system's monotonic seconds."""
        return time.perf_counter()

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(max(duration_s, 0.0))

    def block_s(self, duration_s: float) -> None:
        """Block the calling thread; for launchers and command-line polling, never on an event loop."""
        time.sleep(max(duration_s, 0.0))


SKEW_BYTES = 8


def open_skew(folder: Path) -> memoryview[float]:
    """Return by how many seconds the wall clock of this process is to be wrong: it follows what is written to its file.

    Args:
        folder: Of such files; this process's, a float64 named after its id, is made.
    """
    path = folder / str(os.getpid())
    path.write_bytes(bytes(SKEW_BYTES))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SKEW_BYTES, access=mmap.ACCESS_READ)
    return memoryview(mapped).cast("d")


def set_skew(folder: Path, pid: int, skew_s: float) -> None:
    """Make the wall clock of a process jump.

    Args:
        folder: That the process was started with.
        pid: The process.
        skew_s: By how far it is ahead from now on, seconds.

    Raises:
        FileNotFoundError: the process has not read its wall clock yet, or was not started for this.
    """
    with (folder / str(pid)).open("r+b", buffering=0) as file:
        file.write(memoryview(array("d", [skew_s])).cast("B"))


@cache
def _own_skew() -> memoryview[float] | None:
    from shared.settings import load_settings  # loads pydantic, which what only waits can do without

    folder = load_settings().clock_skew_dir
    return None if folder is None else open_skew(folder)


class LoopClock:
    """The time of an event loop, which need not be the machine's; the wall clock of each may be wrong by its own skew.

    Args:
        loop: The loop.
        epoch_s: Wall clock at the loop's time 0, seconds since the epoch.
        skew_s: How far this wall clock is ahead of the true one, seconds.
    """

    __slots__ = ("_epoch_s", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, epoch_s: float, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._epoch_s = epoch_s + skew_s

    def jump(self, by_s: float) -> None:
        """Set the wall clock ahead, or back; the monotonic one does not notice."""
        self._epoch_s += by_s

    def now_s(self) -> float:
        """Return the wall clock, seconds since the epoch."""
        return self._epoch_s + self._loop.time()

    def monotonic_s(self) -> float:
        """Return the loop's seconds."""
        return self._loop.time()

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the calling task."""
        await asyncio.sleep(max(duration_s, 0.0))


class ManualClock:
    """A clock that moves only when told to.

    Args:
        start_s: First value of both clocks, seconds.
    """

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._time_s = start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        """Return the manual time, seconds."""
        return self._time_s

    def monotonic_s(self) -> float:
        """Return the manual time, seconds."""
        return self._time_s

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the caller until ``advance`` has moved the clock past its wake time."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._time_s + duration_s, next(self._order), future))
        await future

    async def advance(self, duration_s: float) -> None:
        """Move time forward, waking sleepers in order of their wake time and letting each run.

        Args:
            duration_s: Seconds to move, 0 or more.

        Raises:
            ValueError: ``duration_s`` is negative or not a number.
        """
        if not duration_s >= 0:
            raise ValueError(f"duration must be 0 or more seconds, is {duration_s}")
        end_s = self._time_s + duration_s
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            wake_s, _, future = heapq.heappop(self._sleepers)
            self._time_s = max(self._time_s, wake_s)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._time_s = end_s
        await _settle()


async def _settle(num_turns: int = 20) -> None:
    """Give every ready task a few turns of the loop."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
