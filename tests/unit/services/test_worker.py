from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from services.worker import Checkpoint, Worker, WorkerLoad
from shared.clock import ManualClock, SystemClock
from shared.deadline import Deadline
from shared.errors import DeadlineExceededError, OverloadedError
from tests.helpers.waiting import until

GENEROUS = Deadline.after_ms(1e9, SystemClock())  # counts from the import, long before the last test runs


class Blocker:
    """Holds the worker's thread until it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.let_go.wait(10)
        return "done"


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker("ranking:full", queue_max=3)
    yield worker
    worker.close()


async def test_work_runs_on_another_thread_and_gives_its_result(worker: Worker) -> None:
    assert await worker.run(GENEROUS, threading.get_ident) != threading.get_ident()
    await until(lambda: worker.num_held == 0)


async def test_the_loop_stays_free_while_work_runs(worker: Worker) -> None:
    blocker = Blocker()
    task = asyncio.create_task(worker.run(GENEROUS, blocker))
    await until(blocker.started.is_set)

    blocker.let_go.set()

    assert await task == "done"


async def test_work_that_is_cancelled_while_it_waits_never_starts(worker: Worker) -> None:
    blocker = Blocker()
    calls: list[int] = []
    first = asyncio.create_task(worker.run(GENEROUS, blocker))
    await until(blocker.started.is_set)
    waiting = asyncio.create_task(worker.run(GENEROUS, calls.append, 1))
    await until(lambda: worker.num_held == 2)

    waiting.cancel()
    await until(waiting.done)
    blocker.let_go.set()
    await first
    await worker.run(GENEROUS, calls.append, 2)

    assert calls == [2]
    await until(lambda: worker.num_held == 0)


async def test_work_whose_deadline_passes_while_it_waits_never_starts(worker: Worker) -> None:
    clock, blocker = ManualClock(), Blocker()
    calls: list[int] = []
    first = asyncio.create_task(worker.run(GENEROUS, blocker))
    await until(blocker.started.is_set)
    waiting = asyncio.create_task(worker.run(Deadline.after_ms(100, clock), calls.append, 1))
    await clock.advance(0.1)
    blocker.let_go.set()

    with pytest.raises(DeadlineExceededError):
        await waiting
    await first
    assert calls == []


async def test_expired_work_is_refused_at_once(worker: Worker) -> None:
    with pytest.raises(DeadlineExceededError):
        await worker.run(Deadline.after_ms(0, ManualClock()), Blocker())
    assert worker.num_held == 0


@pytest.mark.parametrize("num_held", [2, 3])
async def test_the_queue_is_bounded(worker: Worker, num_held: int) -> None:
    blocker = Blocker()
    held = [asyncio.create_task(worker.run(GENEROUS, blocker)) for _ in range(num_held)]
    await until(lambda: worker.num_held == num_held)
    extra = asyncio.create_task(worker.run(GENEROUS, blocker))
    await until(lambda: extra.done() or worker.num_held > num_held)

    blocker.let_go.set()

    if num_held == 3:
        with pytest.raises(OverloadedError) as caught:
            await extra
        assert (caught.value.context["limit"], caught.value.context["value"]) == (3, 3)
    else:
        assert await extra == "done"
    await asyncio.gather(*held)


async def test_an_error_of_the_work_is_the_callers(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run(GENEROUS, lambda: 1 / 0)
    await until(lambda: worker.num_held == 0)


async def test_running_work_ends_at_its_next_checkpoint_once_its_caller_is_gone(worker: Worker) -> None:
    first, reached = Blocker(), []

    def work(checkpoint: Checkpoint) -> None:
        first()
        checkpoint()
        reached.append("the second step")

    task = asyncio.create_task(worker.run_in_steps(GENEROUS, work))
    await until(first.started.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first.let_go.set()
    await until(lambda: worker.num_held == 0)
    assert not reached


async def test_running_work_ends_at_its_next_checkpoint_once_its_deadline_has_passed(worker: Worker) -> None:
    clock, first = ManualClock(), Blocker()

    def work(checkpoint: Checkpoint) -> None:
        first()
        checkpoint()

    task = asyncio.create_task(worker.run_in_steps(Deadline.after_ms(10, clock), work))
    await until(first.started.is_set)
    await clock.advance(0.02)
    first.let_go.set()
    with pytest.raises(DeadlineExceededError):
        await task


async def test_work_that_is_waited_for_passes_its_checkpoints(worker: Worker) -> None:
    def work(checkpoint: Checkpoint, value: int) -> int:
        checkpoint()
        return value + 1

    assert await worker.run_in_steps(GENEROUS, work, 6) == 7


async def test_the_load_counts_what_ran_what_runs_and_what_waits() -> None:
    clock, blocker = ManualClock(), Blocker()
    worker = Worker("ranking:full", 3, clock=clock)
    deadline = Deadline.after_ms(1e9, clock)
    first, second = (asyncio.create_task(worker.run(deadline, blocker)) for _ in range(2))
    await until(blocker.started.is_set)
    await clock.advance(2.0)
    assert worker.load() == WorkerLoad(busy_s=2.0, num_ended=0, num_waiting=1)
    blocker.let_go.set()
    await asyncio.gather(first, second)
    await until(lambda: worker.num_held == 0)
    await clock.advance(5.0)
    assert worker.load() == WorkerLoad(busy_s=2.0, num_ended=2, num_waiting=0)
    worker.close()


async def test_work_that_fails_was_work_too() -> None:
    clock = ManualClock()
    worker = Worker("ranking:full", 3, clock=clock)
    with pytest.raises(ZeroDivisionError):
        await worker.run(Deadline.after_ms(1e9, clock), lambda: 1 // 0)
    await until(lambda: worker.num_held == 0)
    assert worker.load() == WorkerLoad(0.0, 1, 0)
    worker.close()
