"""Steps and their seconds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.cli.steps import Steps
from shared.clock import SystemClock


def shown(console: Console) -> list[str]:
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


class Watch:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def monotonic_s(self) -> float:
        return self.time_s

    def block_s(self, duration_s: float) -> None:
        self.time_s += duration_s


def test_a_step_ends_with_its_result_and_its_seconds() -> None:
    clock = Watch()
    console = Console(file=io.StringIO(), width=80)
    steps = Steps(console, clock)
    with steps.step("model", "looking") as step:
        steps.pause(2.5)
        step.done("reused 2026")
    assert [line.split() for line in shown(console)] == [
        ["…", "model", "looking"],
        ["✓", "model", "reused", "2026", "2.5", "s"],
    ]
    assert steps.elapsed_s == 2.5
    assert max(map(len, shown(console))) <= 80


def test_an_absence_is_not_ticked_off() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Steps(console, Watch()).step("model", "looking") as step:
        step.absent("none yet")
    assert shown(console)[-1].split() == ["·", "model", "none", "yet", "0.0", "s"]


def test_a_file_gets_no_trailing_spaces_and_no_line_over_its_width() -> None:
    console = Console(file=io.StringIO(), width=80)
    steps = Steps(console, Watch())
    long = "20261129-201233-9f31c2aa, reused; " + "words and more words " * 6
    with steps.step("model", "looking") as step:
        step.done(long)
    steps.note(long)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert all(line == line.rstrip() and len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[1:4]).replace("✓ model", "").replace("0.0 s", "").split()) == long.strip()


def test_a_step_that_fails_says_so_and_passes_the_error_on() -> None:
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(ValueError, match="no"), Steps(console, Watch()).step("mesh", "starting"):
        raise ValueError("no")
    assert shown(console)[-1].split() == ["✗", "mesh", "starting", "0.0", "s"]


def test_a_terminal_shows_a_spinner_that_leaves_nothing_behind() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Steps(console, Watch()).step("mesh", "starting") as step:
        step.done("ready")
    assert "starting" in "".join(shown(console))
    assert shown(console)[-1].endswith("0.0 s")


def test_what_goes_on_inside_a_step_is_shown_where_there_is_a_spinner() -> None:
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        with Steps(console, SystemClock()).step("mesh", "starting") as step:
            step.doing("stations 3/11")
            step.done("ready")
        assert ("starting: stations 3/11" in "\n".join(shown(console))) is is_terminal


def test_a_note_stands_below_its_step() -> None:
    console = Console(file=io.StringIO(), width=80)
    Steps(console, SystemClock()).note("the synthetic log stands in")
    assert shown(console) == ["  the synthetic log stands in"]


def test_a_part_of_a_step_has_no_seconds_of_its_own() -> None:
    console = Console(file=io.StringIO(), width=80)
    Steps(console, Watch()).also("histories", "6,040 users")
    assert [line.split() for line in shown(console)] == [["✓", "histories", "6,040", "users"]]
