"""Requests that meet in a replica, ranked as one: collected while the thread is busy, and a little longer if asked.

No request waits for company longer than ``wait_ms``, nor longer than a tenth of the time that the tightest of those
collected has left, whenever that one came. What was cancelled or has expired by the time its batch starts is not part
of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from services.worker import Worker
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import OverloadedError, RankMeshError, StageUnavailableError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Checkpoint: TypeAlias = Callable[[], None]
Run: TypeAlias = Callable[[Checkpoint, Sequence[ItemT]], Sequence[ResultT | RankMeshError]]
"""Runs items as one and returns result or error of each, in order."""

_SLACK_SHARE = 0.1
_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Entry(Generic[ItemT, ResultT]):
    item: ItemT
    deadline: Deadline
    future: asyncio.Future[ResultT]


class Batcher(Generic[ItemT, ResultT]):
    """Batches for one worker.

    Args:
        station: Deployment name, for messages.
        worker: Runs the batches, one at a time.
        run: What it runs; on the worker's thread.
        batch_max: Most items of a batch.
        wait_ms: Longest wait for company, milliseconds; 0: what came while the worker was busy.
        queue_max: Items that may wait.
        clock: Time.
    """

    def __init__(
        self,
        station: str,
        worker: Worker,
        run: Run[ItemT, ResultT],
        batch_max: int,
        wait_ms: float,
        queue_max: int,
        clock: Clock,
    ) -> None:
        self._station = station
        self._worker = worker
        self._run = run
        self._batch_max = batch_max
        self._wait_ms = wait_ms
        self._queue_max = queue_max
        self._clock = clock
        self._waiting: deque[_Entry[ItemT, ResultT]] = deque()
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Items that wait for their batch."""
        return len(self._waiting)

    async def submit(self, deadline: Deadline, item: ItemT) -> ResultT:
        """Run one item in the next batch that has room and return its result.

        Raises:
            DeadlineExceededError: the deadline passed before its batch started.
            OverloadedError: ``queue_max`` items wait already.
            RankMeshError: what became of this item.
        """
        deadline.check(self._station)
        if len(self._waiting) >= self._queue_max:
            raise OverloadedError(
                f"{self._station} has {len(self._waiting)} requests waiting, limit {self._queue_max}",
                stage=self._station, limit=self._queue_max, value=len(self._waiting), retry_after_s=_RETRY_AFTER_S,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        entry = _Entry[ItemT, ResultT](item, deadline, loop.create_future())
        self._waiting.append(entry)
        self._changed.set()
        if self._pump is None:
            self._pump = loop.create_task(self._serve_all(), name=f"{self._station} batches")
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry in self._waiting:  # its place is somebody else's now
                self._waiting.remove(entry)
                self._changed.set()
            raise

    def close(self) -> None:
        """Drop what waits."""
        if self._pump is not None:
            self._pump.cancel()
        for entry in self._waiting:
            entry.future.cancel()
        self._waiting.clear()

    async def _serve_all(self) -> None:
        try:
            while self._waiting:
                await self._wait_for_company()
                if batch := self._take():
                    await self._serve(batch)
        finally:
            self._pump = None

    async def _wait_for_company(self) -> None:
        end_s = self._clock.monotonic_s() + self._wait_ms / 1e3
        while 0 < len(self._waiting) < self._batch_max:
            slack_ms = min(entry.deadline.remaining_ms() for entry in self._waiting)
            end_s = min(end_s, self._clock.monotonic_s() + max(slack_ms, 0.0) * _SLACK_SHARE / 1e3)
            if (left_s := end_s - self._clock.monotonic_s()) <= 0:
                return
            await self._until_changed(left_s)

    async def _until_changed(self, at_most_s: float) -> None:
        """Wait until somebody comes or goes, or for so long."""
        self._changed.clear()
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._changed.wait()), loop.create_task(self._clock.sleep_s(at_most_s))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _take(self) -> list[_Entry[ItemT, ResultT]]:
        batch: list[_Entry[ItemT, ResultT]] = []
        while self._waiting and len(batch) < self._batch_max:
            entry = self._waiting.popleft()
            if entry.future.done():
                continue
            if entry.deadline.remaining_ms() <= 0:
                entry.future.set_exception(entry.deadline.error(self._station))
                continue
            batch.append(entry)
        return batch

    async def _serve(self, batch: Sequence[_Entry[ItemT, ResultT]]) -> None:
        def checkpoint() -> None:
            if all(entry.future.done() for entry in batch):
                raise StageUnavailableError(f"{self._station}: every call was cancelled", stage=self._station)
            latest.check(self._station)

        latest = max((entry.deadline for entry in batch), key=lambda deadline: deadline.at_s)
        work = self._worker.run(latest, self._run, checkpoint, [entry.item for entry in batch])
        [done] = await asyncio.gather(work, return_exceptions=True)
        if isinstance(done, BaseException) and not isinstance(done, RankMeshError):
            if len(batch) > 1:  # a bug that one item meets must not end the others
                for entry in batch:
                    await self._serve([entry])
                return
            done = StageUnavailableError(f"{type(done).__name__}: {done}", stage=self._station)
        outcomes = [done] * len(batch) if isinstance(done, RankMeshError) else done
        for entry, outcome in zip(batch, outcomes, strict=True):
            if entry.future.done():
                continue
            if isinstance(outcome, RankMeshError):
                entry.future.set_exception(outcome)
            else:
                entry.future.set_result(outcome)
