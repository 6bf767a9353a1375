"""What a mesh says about itself in its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config import HttpConfig, MeshConfig
from cluster.state import MeshState, check_ports, first_state, read_state
from shared.errors import ConfigError
from tests.helpers.mesh_owner import owner_of


def state(pid: int | None = None) -> MeshState:
    return first_state(MeshConfig(), "id", os.getpid() if pid is None else pid, 1.0)


def test_it_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    written = state().model_copy(update={"phase": "ready", "version": "v1"})
    written.write(path)
    assert read_state(path) == written
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{", '{"name": "x"}', '{"another": "layout"}'])
def test_what_cannot_be_read_is_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    path.write_text(content, encoding="utf-8")
    assert read_state(path) is None
    assert read_state(tmp_path / "absent.json") is None


def test_it_runs_while_its_owner_lives() -> None:
    with owner_of("id") as pid:
        running = state(pid)
        check_running(running)
    assert not running.runs


def check_running(running: MeshState) -> None:
    assert running.runs
    assert not running.model_copy(update={"started_ticks": running.started_ticks + 1}).runs
    assert not running.model_copy(update={"phase": "failed"}).runs


def test_the_owner_is_known_by_number_and_start() -> None:
    with owner_of("id") as pid:
        running = state(pid)
        assert running.owner.pid == pid
        assert running.owner.is_alive()
        assert not running.model_copy(update={"mesh_id": "another"}).owner.is_alive()
    assert not state(pid=2**22 + 1).runs


def test_a_port_that_somebody_has_where_the_mesh_is_to_listen_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MeshConfig(http=HttpConfig(host="127.0.0.3", port=9_876, ingress="proxy"))
    asked: list[tuple[int, str]] = []

    def is_listening(port: int, host: str) -> bool:
        asked.append((port, host))
        return host == "127.0.0.3"

    monkeypatch.setattr("cluster.state.is_listening", is_listening)
    with pytest.raises(ConfigError, match="port 9876 is taken"):
        check_ports(config, tmp_path)
    assert asked == [(9_876, "127.0.0.1"), (9_876, "127.0.0.3")]
