"""Tables for people: benchmark rows, the list of benchmarks, comparisons and the verdict of ``verify``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from benchmarks.compare import Comparison
from benchmarks.record import BenchmarkRow
from benchmarks.registry import BENCHMARKS

_SPREAD = ("p50", "p90", "p99")
_NARROW_SPREAD = ("min", "max")

WIDE = 120
"""Columns that the whole table needs."""


def rows_table(rows: Sequence[BenchmarkRow], width: int = WIDE) -> Table:
    """Return rows of one run as a table with one line a metric; the caption says where and on what it ran.

    Args:
        rows: At least one row.
        width: Columns of the terminal; under ``WIDE`` only the smallest and the largest sample are shown of a spread,
            and no parameters of single rows.
    """
    wide = width >= WIDE
    spread_names = _SPREAD if wide else _NARROW_SPREAD
    common = set(rows[0].params.items()).intersection(*(row.params.items() for row in rows))
    table = Table(title=rows[0].benchmark, title_justify="left", caption_justify="left")
    table.add_column("metric", style="bold", no_wrap=True)
    for column in ("value", "unit", *spread_names, "samples" if wide else "of"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    owns = [_words(item for item in row.params.items() if item not in common) for row in rows]
    if wide and any(owns):
        table.add_column("measured with", style="dim", overflow="fold")
    for row, own in zip(rows, owns, strict=True):
        spread = [number(row.quantiles[name]) if name in row.quantiles else "" for name in spread_names]
        table.add_row(
            row.metric,
            number(row.value),
            row.unit,
            *spread,
            str(row.num_samples),
            *([own] if wide and any(owns) else []),
        )
    first = rows[0]
    where = f"{first.started} · {first.device} · commit {first.commit} · config {first.config_hash} · seed {first.seed}"
    shared = _words(item for item in first.params.items() if item in common)
    table.caption = f"{where}\n{shared}" if shared else where
    return table


def names_table() -> Table:
    """Return the registered benchmarks as a table; metrics stand below, where the longest name has room."""
    table = Table(title="benchmarks", title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it measures, and the metrics", overflow="fold")
    for name, entry in BENCHMARKS.items():
        table.add_row(name, Text.assemble(entry.summary, "\n", (", ".join(entry.metrics), "dim")))
    return table


def comparison_table(comparisons: Sequence[Comparison], left: Path, right: Path) -> Table:
    """Return comparisons as a table; figures of the same metric are told apart by the parameters that differ.

    Args:
        comparisons: The figures.
        left: The first file.
        right: The second file.
    """
    names = _apart(left, right)
    table = Table(title=" and ".join(names), title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("benchmark", "metric"):
        table.add_column(column, style="bold", overflow="fold")
    for column in ("unit", *names, "ratio"):
        table.add_column(column, justify="left" if column == "unit" else "right", overflow="fold")
    has_note = any(_note(each) for each in comparisons)
    if has_note:
        table.add_column("note", style="dim", overflow="fold")
    owns = _own_params(comparisons)
    for comparison, own in zip(comparisons, owns, strict=True):
        either = comparison.left or comparison.right
        values = [number(row.value) if row else "-" for row in (comparison.left, comparison.right)]
        ratio = f"{comparison.ratio:.3f}" if comparison.ratio is not None else "-"
        metric = Text.assemble(comparison.metric, ("\n" + own if own else "", "not bold dim"))
        note = [_note(comparison)] if has_note else []
        table.add_row(comparison.benchmark, metric, either.unit if either else "", *values, ratio, *note)
    return table


def _note(comparison: Comparison) -> str:
    both = comparison.left is not None and comparison.right is not None
    return "different machines" if both and not comparison.same_device else ""


def _apart(left: Path, right: Path) -> tuple[str, str]:
    """Return the shortest ends of two paths that differ; the same path twice is first and second."""
    one, other = left.absolute().parts, right.absolute().parts
    if one == other:
        return f"first {left.name}", f"second {right.name}"
    num = next(num for num in range(1, max(len(one), len(other)) + 1) if one[-num:] != other[-num:])
    return str(Path(*one[-num:])), str(Path(*other[-num:]))


def _own_params(comparisons: Sequence[Comparison]) -> list[str]:
    """Return for each figure the parameters in which it differs from others of its metric, in words."""
    params = [set(json.loads(each.params).items()) for each in comparisons]
    kinds = [(each.benchmark, each.metric) for each in comparisons]
    common = {
        kind: set.intersection(*(own for own, other in zip(params, kinds, strict=True) if other == kind))
        for kind in kinds
    }
    return [_words(sorted(own - common[kind])) for own, kind in zip(params, kinds, strict=True)]


def _words(params: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in params)


def verdict_table(document: Mapping[str, object]) -> Table:
    """Return the verdict of ``verify`` as a table; faults in words below."""
    table = Table(title="verify", title_justify="left", caption_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    examples = document["examples"]
    for name, value in document.items():
        if name != "examples":
            text = number(value) if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), f"[bold red]{text}[/]" if name == "wrong" and value else text)
    if isinstance(examples, list) and examples:
        table.caption = "\n".join(map(escape, examples))
    return table


def number(value: float) -> str:
    """Return a figure with about four significant digits."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 else f"{value:.2e}"
