"""A console that is no terminal gets a few lines, not a bar."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from shared.clock import ManualClock
from training.progress import RichProgress, RowsProgress, StepReport, entropy


def test_a_plain_console_gets_a_line_now_and_then() -> None:
    text = io.StringIO()
    with RichProgress(Console(file=text, width=100), ManualClock(), lines=4) as progress:
        for done in range(1, 101):
            progress.step(StepReport(done * 10, 1000, 0.5, 0.3))
    lines = text.getvalue().strip().splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("train 100%")
    assert f"NE {0.5 / entropy(0.3):.4f}" in lines[-1]


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    with RichProgress(Console(file=text, width=100, force_terminal=True), ManualClock()) as progress:
        progress.step(StepReport(500, 1000, 0.5, 0.3))
    assert "50%" in text.getvalue()


def test_ctrl_c_says_how_far_it_was() -> None:
    text = io.StringIO()
    progress = RichProgress(Console(file=text, width=100), ManualClock())
    progress.step(StepReport(340, 1000, 0.5, 0.3))
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert text.getvalue().splitlines()[-1] == "training was stopped at 34%"


async def test_a_pass_over_rows_tells_a_plain_console_now_and_then() -> None:
    text, clock = io.StringIO(), ManualClock()
    with RowsProgress(Console(file=text, width=80), clock, "evaluate", 1_000, lines=2) as progress:
        for _ in range(10):
            await clock.advance(1.0)
            progress.add(100)
    assert text.getvalue().splitlines() == ["evaluate  50%  500 rows, 5 s left", "evaluate 100%  1,000 rows, 0 s left"]


def test_a_pass_over_rows_is_a_bar_on_a_terminal() -> None:
    text = io.StringIO()
    with RowsProgress(Console(file=text, width=80, force_terminal=True), ManualClock(), "evaluate", 10) as progress:
        progress.add(5)
    assert "evaluate" in text.getvalue()
    assert "rows" not in text.getvalue()


def test_entropy_is_that_of_a_coin() -> None:
    assert entropy(0.5) == pytest.approx(math.log(2))
    assert entropy(0.0) == entropy(1.0) == 1.0
