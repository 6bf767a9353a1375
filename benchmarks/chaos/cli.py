"""What ``rankmesh chaos`` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console

from benchmarks.chaos.rates import rate_view
from benchmarks.chaos.report import report_view
from benchmarks.chaos.run import Instead, measure_rates, run_file
from shared.settings import load_settings

_WIDTH_MIN = 120
"""Of the tables, characters; where the output is no terminal its width is 80."""


def run(
    path: Path,
    seed: int,
    *,
    duration_s: float | None = None,
    requests_per_s: float | None = None,
    json_lines: bool = False,
) -> int:
    """Run a scenario; the report is tables, or one JSON object as the last line of standard output.

    Args:
        path: Scenario file.
        seed: Of the schedule.
        duration_s: Length of the load, instead of what the file says.
        requests_per_s: Arrivals, instead of what the file says.
        json_lines: The object instead of tables.

    Returns:
        See ``Report.exit_code``.

    Raises:
        RankMeshError: it could not be run.
    """
    progress = Console(stderr=True, highlight=False)
    var_dir = load_settings().var_dir
    instead = Instead(duration_s, requests_per_s)
    report = run_file(path, seed, var_dir, lambda doing: progress.print(doing, style="dim"), instead)
    if json_lines:
        sys.stdout.write(orjson.dumps(report.document()).decode() + "\n")
    else:
        _console().print(report_view(report))
    return report.exit_code


def rates(path: Path, per_s: Sequence[float], seconds: float, *, json_lines: bool = False) -> None:
    """Show what the mesh of a scenario does at some rates while nothing is broken.

    Args:
        path: Scenario file.
        per_s: Requests a second.
        seconds: At each.
        json_lines: One JSON object a rate instead of a table.

    Raises:
        RankMeshError: it could not be run.
    """
    progress = Console(stderr=True, highlight=False)
    var_dir = load_settings().var_dir
    rows = measure_rates(path, per_s, seconds, var_dir, lambda doing: progress.print(doing, style="dim"))
    if json_lines:
        sys.stdout.write("".join(orjson.dumps(asdict(row)).decode() + "\n" for row in rows))
    else:
        _console().print(rate_view(path.stem, rows))


def _console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH_MIN)
    return console
