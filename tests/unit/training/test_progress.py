"""A console that is no terminal gets a few lines, not a bar."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from shared.clock import ManualClock
from training.progress import RichProgress, StepReport, entropy


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


def test_entropy_is_that_of_a_coin() -> None:
    assert entropy(0.5) == pytest.approx(math.log(2))
    assert entropy(0.0) == entropy(1.0) == 1.0
