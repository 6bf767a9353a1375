from __future__ import annotations

import asyncio
import io
import json

import pytest

from services.meter import Meter
from services.stamps import check_stamps
from shared.clock import ManualClock
from shared.errors import OverloadedError, VersionMismatchError
from shared.log import JsonLogger
from shared.schema.stamp import Stamp


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def meter(lines: io.StringIO) -> Meter:
    return Meter("ranking:full", "ranking-full-0", ManualClock(), JsonLogger(stream=lines))


def test_calls_are_counted_by_outcome_and_gauged_while_they_run(meter: Meter, lines: io.StringIO) -> None:
    with meter.call("rank"):
        assert meter.in_flight == 1
    with pytest.raises(OverloadedError), meter.call("rank", "r/1"):
        raise OverloadedError("full", retry_after_s=1)
    with pytest.raises(asyncio.CancelledError), meter.call("rank"):
        raise asyncio.CancelledError
    with pytest.raises(ZeroDivisionError), meter.call("rank"):
        raise ZeroDivisionError

    counts = {f"calls.rank.{outcome}": 1 for outcome in ("ok", "overloaded", "cancelled", "internal")}
    assert meter.counters() == {"in_flight": 0, **counts}
    line = json.loads(lines.getvalue())
    assert (line["event"], line["service"], line["request_id"]) == ("call_failed", "ranking:full", "r/1")
    assert (line["method"], line["code"]) == ("rank", "overloaded")


async def test_the_timer_measures_on_the_stations_clock() -> None:
    clock = ManualClock()
    with Meter("ranking:full", "x-0", clock).call("rank") as timer:
        await clock.advance(0.25)
        assert timer.elapsed_ms() == pytest.approx(250)


@pytest.mark.parametrize(("request_id", "version"), [("r/2", "v1"), ("r/1", "v2")])
def test_a_foreign_input_is_refused_by_name(request_id: str, version: str) -> None:
    own = Stamp("r/1", "v1", "preprocess", "preprocess-0", 0.1)
    foreign = Stamp(request_id, version, "sequence", "sequence-3", 0.1)

    check_stamps([own], "r/1", "v1", "ranking:full")
    with pytest.raises(VersionMismatchError, match=r"sequence \(sequence-3\)"):
        check_stamps([own, foreign], "r/1", "v1", "ranking:full")
