"""``rankmesh plan``: a table, a picture, figures as JSON, and an exit status that says whether it is enough."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from cluster.cli import app
from tests.helpers.repository import ROOT

TRILLION = ROOT / "configs" / "plan" / "trillion.yaml"


def test_the_default_plan_is_for_two_shards_of_this_machine() -> None:
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 0, result.output
    for words in ("item", "genre", "year", "hottest card", "load, store", "feasible"):
        assert words in result.output


def test_a_trillion_parameters_with_the_arithmetic_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    result = CliRunner().invoke(app, ["plan", str(TRILLION), "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "rows x width over 304 tables = 1.002e+12" in words
    assert "GB dense) / 0.5 GB/s =" in words
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_json_has_the_settings_that_a_model_takes() -> None:
    result = CliRunner().invoke(app, ["plan", "--json"])
    document = json.loads(result.output)
    assert document["feasible"] is True
    assert {settings["name"] for settings in document["settings"]} == {"item", "genre", "year"}
    assert len(document["times_us"]) == 2


def test_a_plan_that_falls_short_is_status_1(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(TRILLION.read_text(encoding="utf-8").replace("load_gb_s: 0.5", "load_gb_s: 0.05"))
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert result.exit_code == 1
    assert "loading takes 1417 s, more than load_s_max 600" in " ".join(result.output.split())


def test_tables_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(TRILLION.read_text(encoding="utf-8").replace("num_cards: 16", "num_cards: 12"))
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert result.exit_code == 1
    assert "tables of 1.04 TB must fit into the 1.02 TB that 12 cards have" in " ".join(result.output.split())
