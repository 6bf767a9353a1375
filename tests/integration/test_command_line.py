"""The verbs against a real mesh: they find it by its name, and what they print is what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.site import Site
from cluster.cli import app
from cluster.local import Mesh
from services.ingress.directory import StatusBody
from shared.schema.api import RankResponse


@pytest.fixture(autouse=True)
def var_dir(world_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_VAR_DIR", str(world_dir))


def run(*arguments: str, expected: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == expected, result.output
    assert "Traceback" not in result.output
    return result


def test_status_names_every_replica(mesh: Mesh) -> None:
    body = StatusBody.model_validate_json(run("status", "--name", mesh.name, "--json").stdout)
    assert body.ready
    assert body.version == mesh.version
    table = run("status", "--name", mesh.name).stdout
    for station in body.deployments:
        assert station.name in table
        assert all(replica.pid is not None and str(replica.pid) in table for replica in station.replicas)


def test_rank_as_table_and_as_json(mesh: Mesh, site: Site) -> None:
    user = str(site.dataset.users.user_id[0])
    items = ",".join(str(item) for item in site.dataset.catalog.item_id[:30].tolist())
    at = str(site.dataset.split.test_start_s)
    arguments = ("rank", "--name", mesh.name, "--user", user, "--candidates", items, "--at", at)
    answer = RankResponse.model_validate_json(run(*arguments, "--json").stdout)
    assert answer.num_candidates == len(answer.candidates) == 30
    assert answer.degraded == []
    table = run(*arguments, "--rows", "30").stdout
    assert "the answer is whole" in table
    assert mesh.version in table
    assert f"ranking:{answer.tier}" in table


def test_what_the_mesh_refuses_is_one_line(mesh: Mesh) -> None:
    result = run("rank", "--name", mesh.name, "--user", "1", "--candidates", "1,1", expected=1)
    assert len(result.output.strip().splitlines()) == 1
    assert "distinct" in result.output or "duplicate" in result.output


def test_events_are_appended_once(mesh: Mesh, tmp_path: Path) -> None:
    event = {"event_id": "line-1", "user_id": "by-hand", "item_id": 1, "weight": 4}
    event |= {"timestamp_s": int(time.time()) - 60}
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(json.dumps({**event, "event_id": f"line-{number}"}) for number in range(3)))
    arguments = ("events", "--name", mesh.name, "--file", str(file), "--json")
    assert json.loads(run(*arguments).stdout) == {"appended": 3, "duplicates": 0, "expired": 0, "buffered": 0}
    assert json.loads(run(*arguments).stdout) == {"appended": 0, "duplicates": 3, "expired": 0, "buffered": 0}
    rank = ("rank", "--name", mesh.name, "--user", "by-hand", "--candidates", "1,2,3", "--json")
    assert RankResponse.model_validate_json(run(*rank).stdout).history_length == 3


def test_a_running_mesh_is_not_started_over(mesh: Mesh) -> None:
    result = run("up", "--name", mesh.name, expected=1)
    assert f"mesh {mesh.name} runs already" in result.output
    assert mesh.is_running
