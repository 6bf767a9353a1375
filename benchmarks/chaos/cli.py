"""What ``rankmesh chaos`` does."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from rich.console import Console

from benchmarks.chaos.report import report_view
from benchmarks.chaos.run import run_file
from shared.settings import load_settings


def run(path: Path, seed: int, *, json_lines: bool = False) -> int:
    """Run a scenario; the report is tables, or one JSON object as the last line of standard output.

    Args:
        path: Scenario file.
        seed: Of the schedule.
        json_lines: The object instead of tables.

    Returns:
        See ``Report.exit_code``.

    Raises:
        RankMeshError: it could not be run.
    """
    progress = Console(stderr=True, highlight=False)
    report = run_file(path, seed, load_settings().var_dir, lambda doing: progress.print(doing, style="dim"))
    if json_lines:
        sys.stdout.write(orjson.dumps(report.document()).decode() + "\n")
    else:
        Console(highlight=False).print(report_view(report))
    return report.exit_code
