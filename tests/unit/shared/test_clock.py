"""The manual clock that tests and the simulator move, and the machine's clock."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.clock import ManualClock, SystemClock, open_skew, set_skew
from shared.settings import child_environment


async def test_time_moves_only_by_hand() -> None:
    clock = ManualClock(100.0)
    assert clock.now_s() == clock.monotonic_s() == 100.0
    await clock.advance(2.5)
    assert clock.now_s() == clock.monotonic_s() == 102.5


async def test_sleepers_wake_in_order_at_their_time() -> None:
    clock = ManualClock(0.0)
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, duration_s: float) -> None:
        await clock.sleep_s(duration_s)
        woken.append((name, clock.now_s()))

    tasks = [asyncio.create_task(sleep(name, s)) for name, s in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0))]
    await clock.advance(0.999)
    assert woken == []
    await clock.advance(1.501)
    assert woken == [("a", 1.0), ("b1", 2.0), ("b2", 2.0)]
    await clock.advance(1.0)
    assert woken[-1] == ("c", 3.0)
    assert clock.now_s() == 3.5
    await asyncio.gather(*tasks)


async def test_a_sleeper_may_sleep_again_within_one_advance() -> None:
    clock = ManualClock(0.0)
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep_s(1.0)
            ticks.append(clock.now_s())

    task = asyncio.create_task(tick())
    await clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    task.cancel()


async def test_a_cancelled_sleeper_harms_nobody() -> None:
    clock = ManualClock(0.0)
    cancelled = asyncio.create_task(clock.sleep_s(1.0))
    other = asyncio.create_task(clock.sleep_s(1.0))
    await asyncio.sleep(0)
    cancelled.cancel()
    await clock.advance(1.0)
    assert other.done()
    assert cancelled.cancelled()


@pytest.mark.parametrize("duration_s", [0.0, -1.0])
@pytest.mark.parametrize("clock", [ManualClock(), SystemClock()], ids=["manual", "system"])
async def test_no_sleep_still_lets_others_run(clock: ManualClock | SystemClock, duration_s: float) -> None:
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    await clock.sleep_s(duration_s)
    assert ran.is_set()


async def test_time_does_not_go_back() -> None:
    clock = ManualClock(5.0)
    for duration_s in (-0.001, math.nan):
        with pytest.raises(ValueError, match="0 or more"):
            await clock.advance(duration_s)
    assert clock.now_s() == 5.0


async def test_the_machines_clock() -> None:
    clock = SystemClock()
    before_s, wall_s = clock.monotonic_s(), clock.now_s()
    await clock.sleep_s(0.002)
    clock.block_s(0.002)
    assert clock.monotonic_s() - before_s >= 0.004
    assert clock.now_s() >= wall_s
    assert wall_s > 1_700_000_000


def test_the_wall_clock_of_a_process_in_a_trial_is_wrong_by_what_its_file_says(tmp_path: Path) -> None:
    skew = open_skew(tmp_path)
    assert skew[0] == 0.0
    set_skew(tmp_path, os.getpid(), -172_800.0)
    assert skew[0] == -172_800.0
    with pytest.raises(FileNotFoundError):
        set_skew(tmp_path, 4_194_305, 1.0)


def test_the_jump_reaches_a_running_process(tmp_path: Path) -> None:
    look = "import sys; from shared.clock import SystemClock; print(SystemClock().now_s(), flush=True)\n"
    program = f"import time; {look}\nfor _ in sys.stdin: print(SystemClock().now_s(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(RANKMESH_CLOCK_SKEW_DIR=str(tmp_path)),
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        before_s = float(child.stdout.readline())
        set_skew(tmp_path, child.pid, 86_400.0)
        child.stdin.write("\n")
        child.stdin.flush()
        assert 86_400 <= float(child.stdout.readline()) - before_s < 86_460
        child.stdin.close()
