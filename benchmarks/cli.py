"""What the command line calls: ``bench``, ``compare`` and ``verify``; each returns the process's exit status.

With ``json_lines`` standard output holds JSON rows and nothing else; everything for a person goes to standard error.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.compare import compare_rows
from benchmarks.record import RESULTS_DIR, RunContext, append_rows, read_rows
from benchmarks.registry import BENCHMARKS, BenchmarkOptions, load
from benchmarks.report import comparison_table, names_table, rows_table, verdict_table
from shared.clock import SystemClock
from shared.settings import load_settings

_PIPE_WIDTH = 160
"""Columns of output that is read by another program, unless COLUMNS says otherwise."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What a person may choose for ``verify``.

    Args:
        url: Base URL of a running mesh; None: the mesh called ``name``.
        name: Mesh of this machine; when none of that name runs, one is brought up and ended.
        config: Deployment file of the mesh; None: the default one.
        num_requests: Requests without speculative embeddings.
        num_speculative: Users with them, two requests each.
        seed: Which requests.
    """

    url: str | None = None
    name: str = "rankmesh"
    config: Path | None = None
    num_requests: int = 300
    num_speculative: int = 48
    seed: int = 0


def bench(
    name: str | None, options: BenchmarkOptions, *, json_lines: bool = False, results_dir: Path | None = None
) -> int:
    """Run one benchmark, show its rows and append them to the results; without a name list the benchmarks.

    Args:
        name: Registered name, or None.
        options: What to run it with.
        json_lines: Rows as JSON lines on standard output instead of a table.
        results_dir: Where rows are appended; None: ``benchmarks/results``, and for a quick run, whose few samples are
            no results, the folder ``bench`` of the run-time files.

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
            _console().print(names_table())
        return 0
    run = load(name)
    context = RunContext.capture(options.seed, SystemClock())
    report = run(options)
    measurements = report.measurements
    if options.quick:
        measurements = tuple(replace(each, params={**each.params, "quick": True}) for each in measurements)
    rows = [context.row(name, report.config_hash, measurement) for measurement in measurements]
    append_rows(rows, results_dir or (load_settings().var_dir / "bench" if options.quick else RESULTS_DIR))
    if json_lines:
        _print_json(*(row.model_dump() for row in rows))
    else:
        console = _console()
        console.print(rows_table(rows, console.width))
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
        _console().print(comparison_table(comparisons, left, right))
    return 0


def verify(options: VerifyOptions, *, json_lines: bool = False) -> int:
    """Compare a mesh with the oracle; the verdict is one JSON object, or a table.

    Args:
        options: Which mesh, and how much.
        json_lines: The verdict as JSON on standard output.

    Returns:
        0 when no answer is wrong, else 1.

    Raises:
        RankMeshError: there is no mesh to verify, or its weights or data are not on this machine.
    """
    from benchmarks.site import Where, running_site
    from benchmarks.verify import Scope, verify_site

    scope = Scope(options.num_requests, options.num_speculative, options.seed)
    console = Console(stderr=True, highlight=False)
    with running_site(Where(options.url, options.name, options.config)) as site, _bars(console) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=of)
            progress.update(tasks[what], completed=done)

        verdict = verify_site(site, scope, tell)
    if json_lines:
        _print_json(verdict.document())
    else:
        Console(highlight=False).print(verdict_table(verdict.document()))
    return 1 if verdict.wrong else 0


def _console() -> Console:
    """Return standard output: as wide as its terminal, and where it is none, wide enough that nothing is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns)


def _bars(console: Console) -> Progress:
    """Return bars on standard error, gone when they are full; none where standard error is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_json(*documents: object) -> None:
    for document in documents:
        sys.stdout.write(orjson.dumps(document).decode() + "\n")
    sys.stdout.flush()
