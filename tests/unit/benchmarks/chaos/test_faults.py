from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.chaos.faults import cut_in_half, flip_byte
from benchmarks.chaos.victims import Title, choose, matching
from cluster.config import MeshConfig
from cluster.environment import MeshFolders
from cluster.local import Mesh
from cluster.processes import Process
from cluster.state import first_state
from shared.errors import StageUnavailableError
from shared.userlog import EmbeddedStore

WORDS: dict[str, tuple[str, ...]] = {
    "owner": ("python", "-m", "cluster.owner", "request.json"),
    "controller": ("ray::ServeController",),
    "busy controller": ("ray::ServeController.listen_for_change",),
    "door": ("/wheel/haproxy", "-f", "haproxy.cfg"),
    "proxy": ("ray::ProxyActor",),
    "first node": ("/ray/raylet", "--raylet_socket_name=a", "--head"),
    "node": ("/ray/raylet", "--raylet_socket_name=b"),
    "embedding-1": ("ray::ServeReplica:rankmesh:embedding-1",),
    "embedding-10": ("ray::ServeReplica:rankmesh:embedding-10",),
    "ranking-full": ("ray::ServeReplica:rankmesh:ranking-full.handle_request",),
    "idle worker": ("ray::IDLE",),
}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("controller", ["controller", "busy controller"]),
        ("door", ["door", "proxy"]),
        ("node", ["node"]),
        ("embedding:1", ["embedding-1"]),
        ("ranking:full", ["ranking-full"]),
        ("ranking:light", []),
    ],
)
def test_a_target_is_found_by_what_its_process_calls_itself(target: str, expected: list[str]) -> None:
    found = [Title(Process(number, number), words) for number, words in enumerate(WORDS.values())]
    names = list(WORDS)
    assert [names[process.pid] for process in matching(target, found)] == expected


def test_one_byte_is_flipped_and_flipping_again_mends_it(tmp_path: Path) -> None:
    path, data = tmp_path / "file", bytes(range(101))
    path.write_bytes(data)
    flip_byte(path)
    assert sum(one != other for one, other in zip(path.read_bytes(), data, strict=True)) == 1
    flip_byte(path)
    assert path.read_bytes() == data


def test_half_a_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    cut_in_half(path)
    assert path.stat().st_size == 50


def test_the_store_is_found_by_its_folder(tmp_path: Path) -> None:
    mesh = mesh_of(tmp_path)
    with pytest.raises(StageUnavailableError, match="no process of store runs"):
        choose("store", mesh, 0.9)
    with EmbeddedStore(mesh.folders.store) as store:
        running = store.running()
        assert running is not None
        assert choose("store", mesh, 0.9).pid == running.pid


def mesh_of(folder: Path) -> Mesh:
    folders = MeshFolders.of(folder, "trial")
    folders.store.mkdir(parents=True)
    return Mesh(folders, first_state(MeshConfig(name="trial"), "0" * 16, os.getpid(), 0.0))
