"""Meshes of this machine: found by what they say, never started twice, nothing left of one that did not start."""

from __future__ import annotations

import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.claims import NameClaim
from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.local import Mesh, log_end
from cluster.processes import MESH_VARIABLE, members, started_ticks
from cluster.state import MeshState, first_state, read_state
from kernels.native import NativeStatus
from models import execution as executions
from models.execution_config import ExecutionConfig
from shared.errors import ConfigError, RankMeshError, StageUnavailableError
from shared.settings import child_environment
from tests.helpers.mesh_owner import owner_of

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


@pytest.fixture
def owner() -> Iterator[int]:
    """Yield the process id of an owner of mesh ``id``."""
    with owner_of("id") as pid:
        yield pid


def test_a_running_one_is_found(tmp_path: Path, owner: int) -> None:
    state = leave_state(tmp_path, "id", owner)
    found = Mesh.find("unit", tmp_path)
    assert found is not None
    assert (found.name, found.url, found.state) == ("unit", "http://127.0.0.1:65000", state)


def test_one_whose_owner_is_gone_is_not_running(tmp_path: Path) -> None:
    leave_state(tmp_path, "id", GONE_PID)
    assert Mesh.find("unit", tmp_path) is None


def test_a_name_is_started_once(tmp_path: Path, owner: int) -> None:
    leave_state(tmp_path, "id", owner)
    with pytest.raises(ConfigError, match="runs already"):
        Mesh.start(CONFIG, var_dir=tmp_path)


def test_two_starts_of_a_name_at_once_do_not_touch_each_other(tmp_path: Path) -> None:
    folders = MeshFolders.of(tmp_path, "unit")
    first = NameClaim.take(folders.claim)
    assert first is not None
    with pytest.raises(ConfigError, match="mesh unit is just being started or ended by another process"):
        Mesh.start(CONFIG, var_dir=tmp_path)
    assert list(folders.root.iterdir()) == [folders.claim]
    first.release()


def test_the_state_of_another_start_is_not_taken_for_its_own(tmp_path: Path) -> None:
    theirs = leave_state(tmp_path, "theirs", GONE_PID)
    child = subprocess.Popen(["false"])
    child.wait()
    mesh = Mesh(MeshFolders.of(tmp_path, "unit"), first_state(CONFIG, "ours", child.pid, 1.0), child)
    with pytest.raises(StageUnavailableError, match="did not start"):
        mesh._await_ready(1.0, None, 0)
    assert mesh.state.mesh_id == "ours"
    mesh.stop()
    assert read_state(mesh.folders.state) == theirs


def test_what_another_start_keeps_is_not_removed(tmp_path: Path) -> None:
    state = leave_state(tmp_path, "id", GONE_PID)
    folders = MeshFolders.of(tmp_path, "unit")
    folders.short.mkdir()
    claim = NameClaim.take(folders.claim)
    assert claim is not None
    try:
        Mesh(folders, state).stop()
        assert folders.short.exists()
    finally:
        claim.release()
    Mesh(folders, state).stop()
    assert not folders.short.exists()


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "A"])
def test_a_name_that_leads_elsewhere_finds_and_ends_nothing(tmp_path: Path, name: str) -> None:
    for verb in (Mesh.find, Mesh.end):
        with pytest.raises(ConfigError, match="the name of a mesh must be"):
            verb(name, tmp_path)


def test_a_process_that_is_not_of_the_mesh_is_not_ended(tmp_path: Path) -> None:
    """Number and start are right, as anybody can read them; the id of the mesh is not in it."""
    with owner_of("another") as foreign:
        leave_state(tmp_path, "id", foreign)
        assert Mesh.find("unit", tmp_path) is None
        assert not Mesh.end("unit", tmp_path)
        assert started_ticks(foreign) is not None


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


@pytest.fixture
def taken() -> Iterator[MeshConfig]:
    """Yield a mesh on whose port another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update={"port": server.getsockname()[1]})})


def test_a_port_that_is_taken_is_refused_before_anything_is_made(tmp_path: Path, taken: MeshConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.start(taken, var_dir=tmp_path)
    port = taken.http.port
    assert caught.value.message == f"port {port} is taken; mesh unit needs {port}: give another --port (http.port)"
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_that_has_the_port_is_named(tmp_path: Path, taken: MeshConfig, owner: int) -> None:
    folders = MeshFolders.of(tmp_path, "other")
    folders.root.mkdir(parents=True)
    other = taken.model_copy(update={"name": "other"})
    first_state(other, "id", owner, 1.0).write(folders.state)
    with pytest.raises(ConfigError, match="is taken by mesh other; mesh unit needs"):
        Mesh.prepare(taken, tmp_path)


def test_a_configuration_that_cannot_start_is_refused_at_once(tmp_path: Path, owner: int) -> None:
    wide = CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update={"host": "0.0.0.0"})})
    with pytest.raises(ConfigError, match="bearer tokens"):
        Mesh.prepare(wide, tmp_path)
    leave_state(tmp_path, "id", owner)
    with pytest.raises(ConfigError, match=r"runs already, at http://127.0.0.1:65000.*rankmesh down --name unit"):
        Mesh.prepare(CONFIG, tmp_path)


def test_kernels_that_this_machine_lacks_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a replica, a minute and a half later."""
    monkeypatch.setattr(executions, "status", lambda: NativeStatus(False, "no compiler", None))
    execution = ExecutionConfig(backend="native", precision="bfloat16")
    with pytest.raises(ConfigError, match="backend native cannot be used: no compiler"):
        Mesh.prepare(CONFIG.model_copy(update={"execution": execution}), tmp_path)


@pytest.mark.slow
def test_a_port_that_is_taken_in_the_last_moment_is_still_the_reason(
    tmp_path: Path, taken: MeshConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner looks again; what it did not open is not looked for when it has ended."""
    monkeypatch.setattr("cluster.local.check_ports", lambda config, var_dir: None)
    with pytest.raises(StageUnavailableError) as caught:
        Mesh.start(taken, var_dir=tmp_path)
    assert f"port {taken.http.port} is taken" in caught.value.message
    assert "remains" not in caught.value.message
    assert str(MeshFolders.of(tmp_path, "unit").log) in caught.value.message


def test_what_remains_does_not_hide_why_a_start_failed(tmp_path: Path, taken: MeshConfig) -> None:
    mesh = Mesh(MeshFolders.of(tmp_path, "unit"), first_state(taken, "id", GONE_PID, 1.0))
    with pytest.raises(StageUnavailableError, match=f"^no weights; .* port {taken.http.port} remains"):
        mesh._stop_after(ConfigError("no weights"))


def test_one_that_was_told_to_end_while_it_started_says_so(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    mesh = Mesh(MeshFolders.of(tmp_path, "unit"), first_state(CONFIG, "id", child.pid, 1.0), child)
    with pytest.raises(RankMeshError, match="it was ended by `rankmesh down`, or a signal, while it started"):
        mesh._await_ready(1.0, None, 0)
    assert mesh.was_ended


def test_the_end_of_a_log_is_a_few_clean_lines_of_this_start(tmp_path: Path) -> None:
    path = tmp_path / "mesh.log"
    path.write_text("an earlier start\n")
    start = path.stat().st_size
    with path.open("a") as log:
        log.write("\x1b[36mfirst\x1b[0m\r\n\n" + "".join(f"line {number}\n" for number in range(3)))
    assert log_end(path, start) == "first | line 0 | line 1 | line 2"
    assert log_end(path) == "first | line 0 | line 1 | line 2"
    assert log_end(path, path.stat().st_size) == "(nothing was written)"
    assert log_end(tmp_path / "none") == "(it cannot be read)"
    path.write_text("x" * 1_000)
    assert log_end(path) == "x" * 200
