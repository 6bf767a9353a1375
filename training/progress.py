"""Tells how training is getting on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shared.clock import Clock

_SMOOTHING = 0.98


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step says.

    Args:
        rows_done: Rows so far.
        rows_total: Rows of the run.
        click_loss: Mean click logloss of the batch before it was learnt from, nats.
        click_rate: Share of clicks in the batch.
    """

    rows_done: int
    rows_total: int
    click_loss: float
    click_rate: float


class TrainProgress(Protocol):
    """Is told of every step."""

    def step(self, report: StepReport) -> None:
        """Take note of a step."""
        ...


class RichProgress:
    """A progress bar: rows a second, loss and normalised entropy of rows before they are learnt from, time left.

    Args:
        console: Where it is drawn; a console that is no terminal gets a line now and then.
        clock: Measures the rate.
        lines: Lines that a console which is no terminal gets.
    """

    def __init__(self, console: Console, clock: Clock, lines: int = 10) -> None:
        self._console = console
        self._clock = clock
        self._lines = lines
        self._next_line = 1
        self._begin_s = clock.monotonic_s()
        self._loss = self._rate = 0.0
        self._weight = self._share = 0.0
        self._bar = Progress(
            TextColumn("[bold]train[/bold]"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[speed]:,.0f} rows/s"),
            TextColumn("loss {task.fields[loss]:.4f} NE {task.fields[ne]:.4f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Draw the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the bar as it is; say how far it was when Ctrl-C ended it."""
        self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._console.print(f"training was stopped at {self._share:.0%}")

    def step(self, report: StepReport) -> None:
        """Take note of a step."""
        self._share = report.rows_done / report.rows_total
        keep = _SMOOTHING
        self._loss = keep * self._loss + (1 - keep) * report.click_loss
        self._rate = keep * self._rate + (1 - keep) * report.click_rate
        self._weight = keep * self._weight + (1 - keep)
        loss = self._loss / self._weight
        ne = loss / entropy(self._rate / self._weight)
        speed = report.rows_done / max(self._clock.monotonic_s() - self._begin_s, 1e-9)
        if self._task is None:
            self._task = self._bar.add_task("train", total=report.rows_total, speed=0.0, loss=0.0, ne=0.0)
        self._bar.update(self._task, completed=report.rows_done, speed=speed, loss=loss, ne=ne)
        if not self._console.is_terminal and report.rows_done * self._lines >= self._next_line * report.rows_total:
            self._next_line = report.rows_done * self._lines // report.rows_total + 1
            self._console.print(f"train {self._share:4.0%}  {speed:,.0f} rows/s  loss {loss:.4f}  NE {ne:.4f}")


class RowsProgress:
    """How far a pass over rows is: a bar that goes on a terminal, a line now and then elsewhere.

    Args:
        console: Where to.
        clock: Measures the rate.
        what: One word.
        rows_total: Rows of the pass.
        lines: Lines that a console which is no terminal gets.
    """

    def __init__(self, console: Console, clock: Clock, what: str, rows_total: int, lines: int = 10) -> None:
        self._console = console
        self._clock = clock
        self._what = what
        self._rows_total = rows_total
        self._lines = lines
        self._rows_done = 0
        self._next_line = 1
        self._begin_s = clock.monotonic_s()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=rows_total)

    def __enter__(self) -> Self:
        """Draw the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def add(self, num_rows: int) -> None:
        """Take note of rows that are done."""
        self._rows_done += num_rows
        self._bar.update(self._task, completed=self._rows_done)
        if not self._console.is_terminal and self._rows_done * self._lines >= self._next_line * self._rows_total:
            self._next_line = self._rows_done * self._lines // self._rows_total + 1
            left_s = (self._clock.monotonic_s() - self._begin_s) * (self._rows_total / self._rows_done - 1)
            share = self._rows_done / self._rows_total
            self._console.print(f"{self._what} {share:4.0%}  {self._rows_done:,} rows, {left_s:.0f} s left")


def entropy(rate: float) -> float:
    """Return the entropy of a label with this base rate, nats; 1 where it has none to speak of."""
    if not 1e-6 < rate < 1 - 1e-6:
        return 1.0
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
