"""Waterfalls and message sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel

from shared.clock import ManualClock
from shared.schema.embeddings import EmbeddingRows
from shared.schema.stamp import Stamp
from shared.schema.user import UserState
from shared.tracing import Waterfall, payload_bytes


async def test_bars_start_and_last_as_long_as_their_stages() -> None:
    clock = ManualClock()
    waterfall = Waterfall(clock)
    with waterfall.start("admission"):
        await clock.advance(0.002)
    gather = waterfall.start("gather")
    lookup = waterfall.start("lookup")
    await clock.advance(0.005)
    lookup.end(compute_ms=3.5)
    await clock.advance(0.001)
    gather.end()
    gather.end(compute_ms=9.0)  # too late: the first end counts
    bars = waterfall.bars(critical={"admission", "gather"})
    assert [(bar.name, bar.critical, bar.compute_ms) for bar in bars] == [
        ("admission", True, None),
        ("gather", True, None),
        ("lookup", False, 3.5),
    ]
    assert [bar.start_ms for bar in bars] == pytest.approx([0, 2, 2])
    assert [bar.duration_ms for bar in bars] == pytest.approx([2, 6, 5])
    assert sum(bar.duration_ms for bar in bars if bar.critical) == pytest.approx(waterfall.total_ms())


async def test_a_stage_that_still_runs_ends_now() -> None:
    clock = ManualClock()
    waterfall = Waterfall(clock, zero_s=clock.monotonic_s() - 0.010)
    waterfall.start("slow")
    await clock.advance(0.004)
    assert waterfall.bars()[0].duration_ms == pytest.approx(4)
    assert waterfall.bars()[0].start_ms == pytest.approx(10)
    await clock.advance(0.004)
    assert waterfall.bars()[0].duration_ms == pytest.approx(8)
    assert waterfall.total_ms() == pytest.approx(18)


async def test_a_stage_that_fails_has_its_bar() -> None:
    clock = ManualClock()
    waterfall = Waterfall(clock)
    with pytest.raises(ZeroDivisionError), waterfall.start("ranking"):
        await clock.advance(0.003 / 0)
    await clock.advance(1.0)
    assert waterfall.bars()[0].duration_ms == 0.0


STAMP = Stamp("r", "v", "x", "x#1", 0.0)


class Body(BaseModel):
    data: bytes
    parts: list[bytes]


@dataclass
class Holder:
    inner: object


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        (np.zeros((10, 4), np.float32), 160),
        (np.zeros((10, 4), np.float32)[:, :2], 80),
        (np.float64(1), 8),
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(bytes(32)), 32),
        ({"a": np.zeros(3, np.int8), "b": {"c": b"xy"}}, 5),
        ([np.zeros(2, np.int64), (np.zeros(1, np.int64), None)], 24),
        (EmbeddingRows(STAMP, 0, {"item": np.zeros((5, 8), np.float32), "year": np.zeros((1, 8), np.float32)}), 192),
        (UserState(STAMP, {"k": np.zeros((2, 3), np.float32)}, 1, 2, 3), 24),
        (Body(data=b"abc", parts=[b"d", b"e"]), 5),
        (Holder(Holder([Body(data=b"abc", parts=[])])), 3),
        (STAMP, 0),
        ("a long text", 0),
        (None, 0),
        (Holder, 0),
    ],
)
def test_payload_bytes(message: object, num_bytes: int) -> None:
    assert payload_bytes(message) == num_bytes
