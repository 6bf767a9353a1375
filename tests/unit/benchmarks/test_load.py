from __future__ import annotations

import asyncio

import pytest

from benchmarks.load import closed_loop, open_loop
from shared.clock import ManualClock


async def test_open_loop_does_not_wait_for_slow_answers() -> None:
    clock = ManualClock()

    async def send(index: int) -> int:
        await clock.sleep_s(5.0 if index == 0 else 0.01)
        return index

    task = asyncio.create_task(open_loop(send, rate_per_s=10, duration_s=1.0, in_flight_max=100, clock=clock))
    await clock.advance(10.0)
    load = await task
    assert [sample.index for sample in load.samples] == list(range(10))
    assert [round(sample.sent_s, 6) for sample in load.samples] == [index / 10 for index in range(10)]
    assert load.samples[0].latency_ms == pytest.approx(5000)
    assert load.samples[1].latency_ms == pytest.approx(10)
    assert load.duration_s == pytest.approx(5.0)
    assert load.answers_per_s == pytest.approx(2.0)


async def test_open_loop_counts_arrivals_above_its_bound_instead_of_queueing_them() -> None:
    clock = ManualClock()

    async def send(index: int) -> int:
        await clock.sleep_s(0.25)
        return index

    task = asyncio.create_task(open_loop(send, rate_per_s=10, duration_s=1.0, in_flight_max=2, clock=clock))
    await clock.advance(5.0)
    load = await task
    assert load.num_not_sent == 3  # every third arrival finds the two before it still in flight
    assert len(load.samples) == 10
    assert len(load.latencies_ms()) == 7


async def test_open_loop_latency_counts_from_the_due_time() -> None:
    clock = ManualClock()
    stalled = asyncio.Event()

    class StallingClock(ManualClock):
        def monotonic_s(self) -> float:
            return clock.monotonic_s() + (2.0 if stalled.is_set() else 0.0)

        async def sleep_s(self, duration_s: float) -> None:
            await clock.sleep_s(duration_s)

    async def send(index: int) -> int:
        stalled.set()  # the generator's own loop is blocked for 2 s while the first request is sent
        return index

    task = asyncio.create_task(open_loop(send, rate_per_s=1, duration_s=2.0, in_flight_max=10, clock=StallingClock()))
    await clock.advance(5.0)
    second = (await task).samples[1]
    assert second.late_ms == pytest.approx(2000)
    assert second.latency_ms == pytest.approx(2000)


async def test_closed_loop_keeps_each_client_at_one_request() -> None:
    clock = ManualClock()
    in_flight, most = 0, 0

    async def send(index: int) -> int:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await clock.sleep_s(0.1)
        in_flight -= 1
        return index

    task = asyncio.create_task(closed_loop(send, num_clients=4, num_requests=10, clock=clock))
    await clock.advance(5.0)
    load = await task
    assert most == 4
    assert sorted(sample.answer for sample in load.samples if sample.answer is not None) == list(range(10))
    assert load.duration_s == pytest.approx(0.3)
    assert load.answers_per_s == pytest.approx(10 / 0.3)


async def test_loads_refuse_nothing_to_do() -> None:
    async def send(index: int) -> int:
        return index

    with pytest.raises(ValueError, match="at least 1"):
        await open_loop(send, rate_per_s=0.1, duration_s=1.0, in_flight_max=1, clock=ManualClock())
    with pytest.raises(ValueError, match="at least 1"):
        await closed_loop(send, num_clients=0, num_requests=1, clock=ManualClock())
