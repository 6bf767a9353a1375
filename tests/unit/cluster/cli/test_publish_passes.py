"""The passes over published weights hand their options over, and print one JSON document where they are asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import quantize, simplify, tables
from models.quantize.plan import PrecisionPlan
from models.simplify import Removal
from shared.weights import WeightStore
from training.simplify import SimplifyReport
from training.tables import TablesReport

_REPORT = SimplifyReport("v1", 0.02, (Removal("exit 1 heads", "hidden units", 8, 6),), {"parameters": (9, 8)}, {})
_PLAN = PrecisionPlan(
    version="v1",
    device="abacus",
    shapes="0",
    threads=1,
    candidate_counts=(8,),
    ne_budget=0.001,
    ne_change=0.0,
    score_error_max=0.0,
    layers={},
)


def _invoke(module: typer.Typer, *args: str) -> str:
    result = CliRunner().invoke(module, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simplify_hands_its_options_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def fake(store: WeightStore, *rest: Any) -> tuple[str, SimplifyReport]:
        given.extend(rest)
        return "v2", _REPORT

    monkeypatch.setattr("training.simplify.simplify_version", fake)
    args = ("--version", "v1", "--threshold", "0.02", "--multiple", "4", "--store", str(tmp_path), "--json")
    document = json.loads(_invoke(simplify.app, *args))
    assert document["version"] == "v2"
    assert document["removed"] == {"exit 1 heads, hidden units": [8, 6]}
    assert (given[0], given[2], given[4]) == ("v1", 0.02, 4)


def test_tables_hands_its_options_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def fake(store: WeightStore, *rest: Any) -> tuple[str, TablesReport]:
        given.extend(rest)
        return "v2", TablesReport("v1", "int8", (), {"full": (0.5, 0.6)})

    monkeypatch.setattr("training.tables.store_tables", fake)
    args = ("--rows", "int8", "--hot", "9", "--version", "v1", "--store", str(tmp_path), "--json")
    document = json.loads(_invoke(tables.app, *args))
    assert document == {
        "version": "v2", "source": "v1", "row_type": "int8", "tables": {}, "click_ne": {"full": [0.5, 0.6]},
    }  # fmt: skip
    assert (given[0], given[2], given[3]) == ("v1", "int8", 9)


def test_quantize_hands_its_options_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def fake(store: WeightStore, *rest: Any) -> PrecisionPlan:
        given.extend(rest)
        return _PLAN

    monkeypatch.setattr("training.quantize.quantize_version", fake)
    folder = tmp_path / "plans"
    args = ("--version", "v1", "--budget", "0.001", "--plans", str(folder), "--store", str(tmp_path), "--json")
    assert PrecisionPlan.model_validate_json(_invoke(quantize.app, *args)) == _PLAN
    assert (given[0], given[2], given[3]) == ("v1", folder, 0.001)


@pytest.mark.parametrize(
    ("app", "option"),
    [
        (simplify.app, ("--threshold", "0.9")),
        (tables.app, ("--rows", "int7")),
        (quantize.app, ("--budget", "-1")),
    ],
)
def test_what_is_out_of_range_is_a_usage_error(app: typer.Typer, option: tuple[str, str]) -> None:
    assert CliRunner().invoke(app, option).exit_code == 2
