"""What the command line calls: ``bench``, ``compare`` and ``verify``; each returns the process's exit status.

With ``json_lines`` standard output holds JSON rows and nothing else; everything for a person goes to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from rich.console import Console

from benchmarks.compare import compare_rows
from benchmarks.record import RESULTS_DIR, RunContext, append_rows, read_rows
from benchmarks.registry import BENCHMARKS, BenchmarkOptions, load
from benchmarks.report import comparison_table, names_table, rows_table
from shared.clock import SystemClock


def bench(
    name: str | None, options: BenchmarkOptions, *, json_lines: bool = False, results_dir: Path = RESULTS_DIR
) -> int:
    """Run one benchmark, show its rows and append them to the results; without a name list the benchmarks.

    Args:
        name: Registered name, or None.
        options: What to run it with.
        json_lines: Rows as JSON lines on standard output instead of a table.
        results_dir: Where rows are appended.

    Raises:
        ConfigError: no benchmark has this name.
    """
    if name is None:
        if json_lines:
            _print_json(
                *(
                    {"benchmark": key, "summary": entry.summary, "metrics": entry.metrics}
                    for key, entry in BENCHMARKS.items()
                )
            )
        else:
            Console().print(names_table())
        return 0
    run = load(name)
    context = RunContext.capture(options.seed, SystemClock())
    report = run(options)
    rows = [context.row(name, report.config_hash, measurement) for measurement in report.measurements]
    append_rows(rows, results_dir)
    if json_lines:
        _print_json(*(row.model_dump() for row in rows))
    else:
        Console().print(rows_table(rows))
    return 0


def compare(left: Path, right: Path, *, json_lines: bool = False) -> int:
    """Show the figures of two result files side by side.

    Raises:
        DataUnavailableError: a file cannot be read.
    """
    comparisons = compare_rows(read_rows(left), read_rows(right))
    if json_lines:
        _print_json(
            *(
                {
                    "benchmark": one.benchmark,
                    "metric": one.metric,
                    "params": orjson.loads(one.params),
                    "left": one.left.value if one.left else None,
                    "right": one.right.value if one.right else None,
                    "ratio": one.ratio,
                    "same_device": one.same_device,
                }
                for one in comparisons
            )
        )
    else:
        Console().print(comparison_table(comparisons, left.name, right.name))
    return 0


def _print_json(*documents: object) -> None:
    for document in documents:
        sys.stdout.write(orjson.dumps(document).decode() + "\n")
    sys.stdout.flush()
