"""Batches: who is in them, how long they wait, and that no item meets another's fate or result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from services.ranking.batching import Batcher
from services.worker import Worker
from shared.clock import ManualClock
from shared.deadline import Deadline
from shared.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, RankMeshError
from tests.helpers.waiting import until


class Recorder:
    """Runs batches of integers: doubles each, refuses 13, breaks on 666, can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, checkpoint: Callable[[], None], items: Sequence[int]) -> list[int | RankMeshError]:
        self.batches.append(list(items))
        assert self.free.wait(10)
        checkpoint()
        if 666 in items:
            raise ZeroDivisionError("a bug")
        bad = InvalidRequestError("unlucky", field="x", limit=12, value=13)
        return [bad if item == 13 else 2 * item for item in items]


class Bench:
    """A batcher with its parts."""

    def __init__(self, batch_max: int = 4, wait_ms: float = 0.0, queue_max: int = 8) -> None:
        self.clock, self.run = ManualClock(), Recorder()
        self.worker = Worker("ranking:full", 8)
        self.batcher: Batcher[int, int] = Batcher(
            "ranking:full", self.worker, self.run, batch_max, wait_ms, queue_max, self.clock
        )

    def submit(self, item: int, budget_ms: float = 1_000.0) -> asyncio.Task[int]:
        return asyncio.create_task(self.batcher.submit(Deadline.after_ms(budget_ms, self.clock), item))

    async def hold(self) -> asyncio.Task[int]:
        """Keep the thread busy with item 1 until ``run.free`` is set."""
        self.run.free.clear()
        first = self.submit(1)
        await until(lambda: self.run.batches)
        return first


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.run.free.set()
    bench.batcher.close()
    bench.worker.close()


async def test_what_comes_while_the_thread_is_busy_is_one_batch(bench: Bench) -> None:
    first = await bench.hold()
    others = [bench.submit(item) for item in range(2, 8)]
    await asyncio.sleep(0)
    bench.run.free.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6, 8, 10, 12, 14]
    assert bench.run.batches == [[1], [2, 3, 4, 5], [6, 7]]


async def test_a_refused_item_and_a_bug_leave_the_others_alone(bench: Bench) -> None:
    first = await bench.hold()
    tasks = [bench.submit(item) for item in (5, 13, 6, 666)]
    await asyncio.sleep(0)
    bench.run.free.set()
    outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert outcomes[:2] == [2, 10]
    assert isinstance(outcomes[2], InvalidRequestError)
    assert outcomes[3] == 12
    assert isinstance(outcomes[4], RankMeshError)


async def test_what_expired_or_was_cancelled_while_it_waited_never_starts(bench: Bench) -> None:
    first = await bench.hold()
    late, gone, live = bench.submit(2, budget_ms=10.0), bench.submit(3), bench.submit(4)
    await bench.clock.advance(0.02)
    gone.cancel()
    await asyncio.sleep(0)
    bench.run.free.set()
    assert await live == 8
    with pytest.raises(DeadlineExceededError):
        await late
    assert (await first, bench.run.batches) == (2, [[1], [4]])


async def test_a_batch_that_nobody_waits_for_ends_at_its_checkpoint(bench: Bench) -> None:
    first = await bench.hold()
    first.cancel()
    await asyncio.sleep(0)
    bench.run.free.set()
    await until(lambda: bench.worker.num_held == 0)
    assert await bench.submit(2) == 4


@pytest.mark.parametrize(("count", "is_accepted"), [(7, True), (8, True), (9, False)])
async def test_the_queue_is_bounded(bench: Bench, count: int, is_accepted: bool) -> None:
    await bench.hold()
    tasks = [bench.submit(item) for item in range(2, 2 + count)]
    await asyncio.sleep(0)
    bench.run.free.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[-1], OverloadedError) != is_accepted


async def test_one_waits_for_company_but_not_beyond_its_own_slack() -> None:
    bench = Bench(wait_ms=50.0)
    patient = bench.submit(1)
    await bench.clock.advance(0.03)
    assert not bench.run.batches
    company = bench.submit(2)
    await bench.clock.advance(0.021)
    assert list(await asyncio.gather(patient, company)) == [2, 4]
    hurried = bench.submit(3, budget_ms=100.0)
    await bench.clock.advance(0.0101)
    assert await hurried == 6
    assert bench.run.batches == [[1, 2], [3]]
    bench.worker.close()


async def test_a_hurried_one_that_joins_a_patient_one_is_not_kept_waiting() -> None:
    bench = Bench(wait_ms=500.0)
    patient = bench.submit(1, budget_ms=10_000.0)
    await bench.clock.advance(0.1)
    hurried = bench.submit(2, budget_ms=100.0)
    await bench.clock.advance(0.0101)
    assert list(await asyncio.gather(patient, hurried)) == [2, 4]
    assert bench.run.batches == [[1, 2]]
    bench.worker.close()


async def test_a_batch_that_fills_while_it_waits_starts() -> None:
    bench = Bench(batch_max=2, wait_ms=1e6)
    first = bench.submit(1, budget_ms=1e9)
    await bench.clock.advance(1.0)
    assert list(await asyncio.gather(first, bench.submit(2, budget_ms=1e9))) == [2, 4]
    bench.worker.close()


async def test_who_has_gone_holds_no_place_in_the_queue(bench: Bench) -> None:
    first = await bench.hold()
    gone = [bench.submit(item) for item in range(2, 10)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    live = bench.submit(10)
    await asyncio.sleep(0)
    bench.run.free.set()
    assert (await first, await live, bench.run.batches) == (2, 20, [[1], [10]])


async def test_who_goes_while_it_waits_for_company_leaves_nothing_running() -> None:
    bench = Bench(wait_ms=500.0)
    alone = bench.submit(1, budget_ms=10_000.0)
    await bench.clock.advance(0.1)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    await bench.clock.advance(0.0)
    assert (bench.batcher._pump, bench.batcher.num_waiting, bench.run.batches) == (None, 0, [])
    bench.worker.close()


async def test_a_full_batch_does_not_wait() -> None:
    bench = Bench(batch_max=2, wait_ms=1e6)
    assert list(await asyncio.gather(bench.submit(1), bench.submit(2))) == [2, 4]
    bench.worker.close()
