"""What the owner of a mesh takes for the end of Ray: the processes themselves, not what this process believes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from cluster.config import MeshConfig
from cluster.node import Node
from shared.clock import SystemClock


class Head:
    """Ray's first node, some of whose processes have died."""

    def __init__(self, *dead: str) -> None:
        self._dead = dead

    def dead_processes(self) -> list[tuple[str, object]]:
        return [(kind, object()) for kind in self._dead]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return Node(MeshConfig(), tmp_path, SystemClock())


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
