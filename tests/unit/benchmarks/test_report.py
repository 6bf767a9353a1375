from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.compare import compare_rows
from benchmarks.registry import BENCHMARKS
from benchmarks.report import comparison_table, names_table, number, rows_table, verdict_table
from tests.helpers.benchmark_rows import make_row


def shown(table: Table, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_all_rows_share_stands_below_and_the_rest_in_the_row() -> None:
    rows = [make_row(params={"clients": 4, "candidates": 500}), make_row(params={"clients": 4, "candidates": 20})]
    lines = shown(rows_table(rows)).splitlines()
    assert sum("clients 4" in line for line in lines) == 1
    assert [line for line in lines if "p50_ms_500" in line and "candidates 20 " in line]
    assert all(word in " ".join(lines) for word in ("2 x test", "abcdef012345", "0123456789ab"))


def test_rows_of_one_kind_need_no_column_for_their_parameters() -> None:
    text = shown(rows_table([make_row(), make_row(metric="p99_ms_500")]))
    assert "measured with" not in text
    assert "candidates 500" in text


def test_a_comparison_shows_both_values_the_ratio_and_other_machines() -> None:
    comparisons = compare_rows([make_row(value=20.0)], [make_row(value=5.0, device="another"), make_row(metric="new")])
    text = shown(comparison_table(comparisons, Path("a.jsonl"), Path("b.jsonl")))
    assert "0.250" in text
    assert "different machines" in text
    assert "new" in text


def columns(text: str) -> list[str]:
    return next(line for line in text.splitlines() if "metric" in line).replace("┃", " ").split()


@pytest.mark.parametrize(
    ("left", "right", "titles"),
    [
        ("old/mesh.jsonl", "new/mesh.jsonl", ["old/mesh.jsonl", "new/mesh.jsonl"]),
        ("1/x/mesh.jsonl", "2/x/mesh.jsonl", ["1/x/mesh.jsonl", "2/x/mesh.jsonl"]),
        ("mesh.jsonl", "mesh.jsonl", ["first", "mesh.jsonl", "second", "mesh.jsonl"]),
    ],
)
def test_the_two_columns_have_titles_that_differ(left: str, right: str, titles: list[str]) -> None:
    text = shown(comparison_table(compare_rows([make_row()], [make_row()]), Path(left), Path(right)))
    assert columns(text) == ["benchmark", "metric", "unit", *titles, "ratio"]


def test_long_names_are_folded_and_figures_of_one_metric_told_apart() -> None:
    name = "a_metric_with_a_name_that_is_much_longer_than_its_column"
    rows = [make_row(metric=name, params={"clients": 4, "candidates": number}) for number in (20, 500)]
    text = shown(comparison_table(compare_rows(rows, rows), Path("a.jsonl"), Path("b.jsonl")), 80)
    cells = "".join(line.split("│")[2].strip() if "│" in line else "|" for line in text.splitlines())
    assert f"{name}candidates 20{name}candidates 500" in cells
    assert "…" not in text


def test_the_list_breaks_no_name() -> None:
    text = shown(names_table(), 80)
    assert all(metric in text for entry in BENCHMARKS.values() for metric in entry.metrics)


def test_the_list_names_every_fixed_metric() -> None:
    assert all(metric in shown(names_table()) for metric in ("p50_ms_500", "p99_ms_500", "overhead_ms"))


def test_a_verdict_shows_its_counts_and_some_faults() -> None:
    verdict = {"requests": 300, "wrong": 2, "max_abs_error": 1.5e-6, "examples": ["17-200-short [x]: order"]}
    text = shown(verdict_table(verdict))
    assert all(word in text for word in ("300", "wrong", "1.50e-06", "17-200-short [x]: order"))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (12345.6, "12,346"), (12.345678, "12.35"), (0.00001, "1.00e-05")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
