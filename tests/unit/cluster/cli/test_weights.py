"""The list of published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.state import first_state
from shared.weights import WeightStore
from tests.helpers.mesh_owner import owner_of


def call(*args: str) -> str:
    result = CliRunner().invoke(app, ["weights", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def var_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(tmp_path))
    return tmp_path


def publish(var_dir: Path, version: str, **documents: Any) -> None:
    with WeightStore(var_dir / "weights").writer(version) as writer:
        writer.add_tensors("dense", {"w": np.zeros(1, np.float32)})
        for name, document in documents.items():
            writer.add_json(name, document)
        writer.commit()


def test_newest_first_with_run_quality_and_who_serves(var_dir: Path) -> None:
    objectives = {"click": {"auc": 0.8012, "ne": 0.777}}
    evaluation = {"split": "test", "history_mode": "strict", "tier": "full", "objectives": objectives}
    publish(var_dir, "20260101-000000-aaaaaaaa", metrics={"train": {"name": "quick"}, "evaluations": [evaluation]})
    publish(var_dir, "20260102-000000-bbbbbbbb")
    folders = MeshFolders.of(var_dir, "b")
    folders.root.mkdir()
    with owner_of("id") as pid:
        state = first_state(MeshConfig(name="b"), "id", pid, 1.0)
        state.model_copy(update={"version": "20260101-000000-aaaaaaaa"}).write(folders.state)
        newest, older = (json.loads(line) for line in call("--json").splitlines())
    assert (newest["version"], newest["click_auc"], newest["served_by"]) == ("20260102-000000-bbbbbbbb", None, [])
    assert (older["run"], older["click_auc"], older["served_by"]) == ("quick", 0.8012, ["b"])
    text = call()
    assert text.index("bbbbbbbb") < text.index("aaaaaaaa")
    assert all(word in text for word in ("quick", "0.801", "0.777"))
    assert len(call("--num", "1", "--json").splitlines()) == 1


def test_an_empty_store_says_what_fills_it(var_dir: Path) -> None:
    assert call() == f"no weights in {var_dir / 'weights'} yet; `rankmesh train` makes some\n"
    assert call("--json") == ""


def test_versions_that_are_damaged_are_named(var_dir: Path) -> None:
    for number in range(7):
        publish(var_dir, f"v{number}")
        (var_dir / "weights" / f"v{number}" / "dense.safetensors").write_bytes(b"cut")
    result = CliRunner().invoke(app, ["weights"])
    assert result.exit_code == 0, result.output
    assert "no complete weights" in result.stdout
    lines = result.stderr.splitlines()
    assert lines[0] == "left out: weights v0: missing or of the wrong size: dense.safetensors"
    assert lines[-1] == "left out: 2 more"


@pytest.mark.parametrize(
    "metrics",
    [{"train": []}, {"evaluations": 3}, {"evaluations": [{}]}, {"evaluations": [1]}, {"train": {"name": {"a": 1}}}],
)
def test_metrics_of_another_form_are_no_reason_to_fail(var_dir: Path, metrics: dict[str, Any]) -> None:
    publish(var_dir, "v", metrics=metrics)
    assert call().splitlines()[-1].startswith("v ")


def test_a_figure_that_is_no_number_is_not_shown(var_dir: Path) -> None:
    evaluation = {"split": "test", "history_mode": "strict", "objectives": {"click": {"auc": "high", "ne": [1]}}}
    publish(var_dir, "v", metrics={"evaluations": [evaluation]})
    assert json.loads(call("--json"))["click_auc"] is None
