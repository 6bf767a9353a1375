from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.faults import cut_in_half, flip_byte
from benchmarks.chaos.victims import Title, matching
from cluster.processes import Process

WORDS: dict[str, tuple[str, ...]] = {
    "owner": ("python", "-m", "cluster.owner", "request.json"),
    "store": ("/wheel/valkey-server 127.0.0.1:6001",),
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
        ("store", ["store"]),
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
