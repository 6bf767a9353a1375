"""Meshes of this machine: found by what they say, never started twice, nothing left of one that did not start."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.local import Mesh
from cluster.processes import MESH_VARIABLE, members
from cluster.state import MeshState, first_state
from shared.errors import ConfigError, StageUnavailableError
from shared.settings import child_environment

CONFIG = MeshConfig.model_validate({"name": "unit", "http": {"port": 65_000, "ingress": "proxy"}})
GONE_PID = 2**22 + 1


def leave_state(var_dir: Path, mesh_id: str, pid: int) -> MeshState:
    folders = MeshFolders.of(var_dir, CONFIG.name)
    folders.root.mkdir(parents=True)
    state = first_state(CONFIG, mesh_id, pid, 1.0).model_copy(update={"phase": "ready"})
    state.write(folders.state)
    return state


def test_there_is_none(tmp_path: Path) -> None:
    assert Mesh.find("unit", tmp_path) is None
    assert not Mesh.end("unit", tmp_path)


def test_a_running_one_is_found(tmp_path: Path) -> None:
    state = leave_state(tmp_path, "id", os.getpid())
    found = Mesh.find("unit", tmp_path)
    assert found is not None
    assert (found.name, found.url, found.state) == ("unit", "http://127.0.0.1:65000", state)


def test_one_whose_owner_is_gone_is_not_running(tmp_path: Path) -> None:
    leave_state(tmp_path, "id", GONE_PID)
    assert Mesh.find("unit", tmp_path) is None


def test_a_name_is_started_once(tmp_path: Path) -> None:
    leave_state(tmp_path, "id", os.getpid())
    with pytest.raises(ConfigError, match="runs already"):
        Mesh.start(CONFIG, var_dir=tmp_path)


def test_what_a_killed_owner_left_is_ended(tmp_path: Path) -> None:
    mesh_id = secrets.token_hex(8)
    left = subprocess.Popen(["sleep", "60"], env=child_environment(**{MESH_VARIABLE: mesh_id}))
    state = leave_state(tmp_path, mesh_id, GONE_PID)
    assert Mesh.end("unit", tmp_path)
    assert left.wait(1) != 0
    assert not MeshFolders.of(tmp_path, state.name).state.exists()
    assert not Mesh.end("unit", tmp_path)


@pytest.mark.slow
def test_a_mesh_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """The owner's own process, up to the point where it would start Ray: there are no weights."""
    told: list[str] = []
    with pytest.raises(StageUnavailableError, match="holds no complete version") as caught:
        Mesh.start(CONFIG, var_dir=tmp_path, on_progress=told.append)
    assert "unit" in caught.value.message
    assert told[0] == "looking around"
    state = MeshState.model_validate_json(MeshFolders.of(tmp_path, "unit").state.read_bytes())
    assert state.phase == "failed"
    assert members(state.mesh_id) == []
    assert Mesh.find("unit", tmp_path) is None


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    from http.server import HTTPServer, SimpleHTTPRequestHandler

    server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    try:
        config = CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update={"port": server.server_port})})
        with pytest.raises(StageUnavailableError, match=f"port {server.server_port} is taken"):
            Mesh.start(config, var_dir=tmp_path)
    finally:
        server.server_close()
