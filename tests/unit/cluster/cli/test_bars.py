"""Bars of text cells."""

from __future__ import annotations

import pytest

from cluster.cli.bars import milliseconds, share_bar, span_bar
from shared.schema.api import StageTime


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "    "),
        (1.0, "████"),
        (0.5, "██  "),
        (1 / 32, "▏   "),
        (7.9 / 8 / 4, "█   "),
        (-3.0, "    "),
        (7.0, "████"),
    ],
)
def test_share_bar_fills_to_an_eighth_and_keeps_its_width(share: float, expected: str) -> None:
    assert share_bar(share, 4, "").plain == expected


def stage(start_ms: float, duration_ms: float, compute_ms: float | None = None) -> StageTime:
    return StageTime(name="s", start_ms=start_ms, duration_ms=duration_ms, compute_ms=compute_ms)


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        (stage(0, 10), "━━━━━━━━━━"),
        (stage(5, 5, 2), "     ━━───"),
        (stage(2, 0.01, 0.01), "  ━"),
        (stage(10, 0), "         ━"),
        (stage(9.9, 5), "         ━"),
        (stage(0, 4, 9), "━━━━"),
        (stage(0, 4, 0), "────"),
    ],
)
def test_span_bar_starts_and_ends_on_the_axis(bar: StageTime, expected: str) -> None:
    assert span_bar(bar, 10, 10).plain == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, "0.00 ms"), (0.314, "0.31 ms"), (14.94, "14.9 ms"), (131.4, "131 ms")]
)
def test_milliseconds(value: float, expected: str) -> None:
    assert milliseconds(value) == expected
