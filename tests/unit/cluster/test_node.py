"""What the owner of a mesh takes for the end of Ray: the processes themselves, not what this process believes."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import serve

from cluster.config import HttpConfig, MeshConfig, RayConfig
from cluster.node import Node
from shared.clock import SystemClock
from shared.log import JsonLogger


class Head:
    """Ray's first node, some of whose processes have died."""

    def __init__(self, *dead: str, refuses: int = 0) -> None:
        self._dead = set(dead)
        self._refuses = refuses
        self.num_started = 0

    def dead_processes(self) -> list[tuple[str, object]]:
        return [(kind, object()) for kind in self._dead]

    def kill_gcs_server(self, *, check_alive: bool) -> None:
        assert not check_alive

    def start_gcs_server(self) -> None:
        if self._refuses:
            self._refuses -= 1
            raise OSError("the port file did not come")
        self.num_started += 1
        self._dead.discard("gcs_server")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return Node(MeshConfig(), tmp_path, SystemClock())


@pytest.mark.parametrize(
    ("ingress", "host", "told"),
    [("haproxy", "0.0.0.0", "127.0.0.1"), ("haproxy", "10.0.0.9", "127.0.0.1"), ("proxy", "10.0.0.9", "10.0.0.9")],
)
def test_what_is_behind_haproxy_is_on_loopback_wherever_the_mesh_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingress: str, host: str, told: str
) -> None:
    found: dict[str, object] = {}
    monkeypatch.setattr(serve, "start", lambda **options: found.update(options))
    http = HttpConfig.model_validate({"host": host, "port": 9_000, "ingress": ingress})
    Node(MeshConfig(http=http), tmp_path, SystemClock()).open_door()
    assert found["http_options"] == {"host": told, "port": 9_000}


@pytest.mark.parametrize(
    ("dead", "said"),
    [
        ((), ""),
        (("log_monitor", "monitor"), ""),
        (("raylet",), "its raylet died"),
        (("gcs_server",), "its GCS died"),
        (("raylet", "gcs_server"), "its GCS and raylet died"),
    ],
)
def test_a_dead_process_that_nothing_brings_back_is_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch, dead: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", Head(*dead))
    assert node.ended() == said


def test_so_is_a_store_that_is_silent_for_too_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", Head())
    monkeypatch.setattr(node, "_pulse", SimpleNamespace(silence_s=89.0))
    assert node.ended() == ""
    monkeypatch.setattr(node, "_pulse", SimpleNamespace(silence_s=91.0))
    assert node.ended() == "its GCS has not answered for 91 s"


def test_a_process_that_is_not_connected_has_no_ray(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", None)
    assert node.ended() == "this process is not connected to it any more"


def test_a_gcs_that_keeps_files_is_started_again_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    config = MeshConfig(ray=RayConfig(gcs_storage="rocksdb"))
    node, head, lines = Node(config, tmp_path, SystemClock()), Head("gcs_server", refuses=1), io.StringIO()
    monkeypatch.setattr("ray._private.worker._global_node", head)
    for _ in range(3):
        assert node.ended() == ""
        node.replace_dead(JsonLogger(stream=lines))
    assert head.num_started == 1
    assert lines.getvalue().count("gcs_ended") == 2
    assert "the port file did not come" in lines.getvalue()
    assert "gcs_restarted" in lines.getvalue()


def test_one_that_keeps_nothing_is_not(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head("gcs_server")
    monkeypatch.setattr("ray._private.worker._global_node", head)
    node.replace_dead(JsonLogger(stream=io.StringIO()))
    assert head.num_started == 0
