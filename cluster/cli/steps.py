"""Shows what is being done: one line a step with its seconds, a spinner while it runs where there is a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_NAME_WIDTH = 11


class PausingClock(Protocol):
    """What steps need of a clock."""

    def monotonic_s(self) -> float:
        """Return seconds that only grow."""
        ...

    def block_s(self, duration_s: float) -> None:
        """Block the calling thread."""
        ...


class Step:
    """One step while it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.result = ""
        self.found = True
        self._tell: Callable[[str], None] | None = None

    def doing(self, words: str) -> None:
        """Say what is going on inside the step, where there is a spinner to show it."""
        if self._tell is not None:
            self._tell(words)

    def follow(self, tell: Callable[[str], None]) -> None:
        """Have ``doing`` call ``tell``."""
        self._tell = tell

    def done(self, result: str) -> None:
        """Say what came of it, in a few words."""
        self.result = result

    def absent(self, result: str) -> None:
        """Say that there was nothing to be had: no failure, and nothing to tick off."""
        self.result, self.found = result, False


class Steps:
    """Prints steps as they end.

    Args:
        console: Where to.
        clock: Measures them.
    """

    def __init__(self, console: Console, clock: PausingClock) -> None:
        self.console = console
        self._clock = clock
        self._began_s = clock.monotonic_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first moment."""
        return self._clock.monotonic_s() - self._began_s

    @contextmanager
    def step(self, name: str, doing: str, *, spinner: bool = True) -> Iterator[Step]:
        """Run the body as one step.

        Args:
            name: One word, the same in every run.
            doing: What is going on, shown while it does.
            spinner: Off for a body that draws its own progress; then ``doing`` is printed first.
        """
        step = Step(name)
        began_s = self._clock.monotonic_s()
        try:
            if spinner and self.console.is_terminal:
                with self._spinner(step, doing):
                    yield step
            else:
                self._line("…", "bright_black", name, doing, None)
                yield step
        except BaseException:
            self._line("✗", "bold red", name, doing, self._clock.monotonic_s() - began_s)
            raise
        sign, style = ("✓", "bold green") if step.found else ("·", "bright_black")
        self._line(sign, style, name, step.result, self._clock.monotonic_s() - began_s)

    def also(self, name: str, result: str) -> None:
        """Print what came of a part of the step before, whose seconds it took."""
        self._line("✓", "bold green", name, result, None)

    def pause(self, duration_s: float) -> None:
        """Wait; for polling inside a step."""
        self._clock.block_s(duration_s)

    def note(self, words: str) -> None:
        """Print something that a person should know, below the step that it belongs to."""
        for line in _wrapped(words, self.console.width - 2):
            self.console.print(Text(f"  {line}", style="yellow"), highlight=False, soft_wrap=True)

    @contextmanager
    def _spinner(self, step: Step, doing: str) -> Iterator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(f"{step.name:<{_NAME_WIDTH}}{doing}", total=None)
            step.follow(lambda words: progress.update(task, description=f"{step.name:<{_NAME_WIDTH}}{doing}: {words}"))
            yield

    def _line(self, sign: str, style: str, name: str, words: str, seconds: float | None) -> None:
        room = max(self.console.width - _NAME_WIDTH - 12, 20)
        first, *rest = _wrapped(words, room)
        parts: list[str | tuple[str, str]] = [(sign, style), " ", (f"{name:<{_NAME_WIDTH}}", "bold")]
        if seconds is None:
            parts.append(first)
        else:
            parts += [f"{first:<{room}} ", (f"{f'{seconds:.1f} s':>8}", "bright_black")]
        self.console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)
        for line in rest:
            self.console.print(Text(" " * (_NAME_WIDTH + 2) + line), soft_wrap=True, highlight=False)


def _wrapped(words: str, width: int) -> list[str]:
    """Return lines of at most so many columns; a path or a version is never broken."""
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False) or [""]
