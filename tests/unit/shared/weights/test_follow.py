"""Following a log: new deltas are applied in order, trouble is told and tried again, a gap ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.clock import ManualClock
from shared.errors import OverloadedError, RankMeshError
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta
from shared.weights.follow import DeltaFollower, FollowConfig


class Target:
    """Keeps the numbers of what was applied; refuses when it is told to."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.refusal: RankMeshError | None = None

    def apply(self, delta: Delta) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.applied.append(delta.sequence)


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    return DeltaLog(WeightStore(tmp_path), "v")


def append(log: DeltaLog, num: int) -> None:
    for _ in range(num):
        sequence, crc = log.last()
        log.append(Delta("v", sequence + 1, crc, "now"))


async def test_new_deltas_are_applied_in_order_and_once(log: DeltaLog) -> None:
    target = Target()
    follower = DeltaFollower(log, target, FollowConfig(deltas_max=3), ManualClock())
    assert await follower.look() == 0
    append(log, 5)
    assert [await follower.look() for _ in range(3)] == [3, 2, 0]
    assert target.applied == [1, 2, 3, 4, 5]
    assert (follower.status.sequence, follower.status.newest, follower.status.looks) == (5, 5, 4)


async def test_it_begins_where_the_weights_are(log: DeltaLog) -> None:
    append(log, 4)
    target = Target()
    await DeltaFollower(log, target, FollowConfig(), ManualClock(), sequence=3).look()
    assert target.applied == [4]


async def test_trouble_is_told_and_tried_again(log: DeltaLog) -> None:
    append(log, 2)
    target = Target()
    follower = DeltaFollower(log, target, FollowConfig(), ManualClock())
    target.refusal = OverloadedError("no block is free")
    assert await follower.look() == 0
    assert (follower.status.reason, follower.status.needs_snapshot) == ("no block is free", False)
    target.refusal = None
    assert await follower.look() == 2
    assert follower.status.reason == ""


async def test_a_gap_ends_it(log: DeltaLog, tmp_path: Path) -> None:
    append(log, 3)
    (tmp_path / "deltas" / "v" / "00000002.delta").unlink()
    target = Target()
    follower = DeltaFollower(log, target, FollowConfig(), ManualClock())
    await follower.run()
    assert target.applied == [1]
    assert follower.status.needs_snapshot
    assert "a full snapshot is needed" in follower.status.reason
    assert follower.status.newest == 3


async def test_it_looks_once_a_period_until_it_is_cancelled(log: DeltaLog) -> None:
    class Ticks(ManualClock):
        slept: tuple[float, ...] = ()

        async def sleep_s(self, duration_s: float) -> None:
            self.slept = (*self.slept, duration_s)
            append(log, 1)
            if len(self.slept) == 3:
                raise asyncio.CancelledError

    clock, target = Ticks(), Target()
    with pytest.raises(asyncio.CancelledError):
        await DeltaFollower(log, target, FollowConfig(period_s=2.0), clock).run()
    assert target.applied == [1, 2]
    assert clock.slept == (2.0, 2.0, 2.0)
