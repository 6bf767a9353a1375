"""Which scenario a name means."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from cluster.cli import chaos
from cluster.cli.chaos import scenario_path


@pytest.fixture(autouse=True)
def scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("smoke", "soak"):
        (tmp_path / f"{name}.yaml").touch()
    monkeypatch.setattr(chaos, "SCENARIOS", tmp_path)
    return tmp_path


def test_a_scenario_is_a_file_or_a_name(scenarios: Path, tmp_path: Path) -> None:
    assert scenario_path("smoke") == scenarios / "smoke.yaml"
    own = tmp_path / "own.yml"
    own.touch()
    assert scenario_path(str(own)) == own


def test_one_that_is_not_there_is_told_beside_those_that_are() -> None:
    with pytest.raises(typer.BadParameter, match="nosuch is no file, nor one of smoke, soak"):
        scenario_path("nosuch")
