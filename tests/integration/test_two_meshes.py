"""Two meshes side by side know nothing of each other, and an ended one leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from benchmarks.chaos.world import hosted_world, world_config
from cluster.local import Mesh
from cluster.loopback import is_listening
from cluster.processes import members


def rank(url: str, user: str) -> int:
    document = {"user_id": user, "candidates": [1, 2, 3], "timestamp_s": 2_000_000_000, "speculative": False}
    response = httpx.post(f"{url}/v1/rank", json=document, timeout=30.0, trust_env=False)
    assert response.status_code == 200, response.text
    assert response.json()["degraded"] == []
    return int(response.json()["history_length"])


@pytest.mark.slow
def test_two_meshes_share_nothing_and_an_ended_one_leaves_nothing(mesh: Mesh, world_dir: Path) -> None:
    event = {"event_id": "1", "user_id": "shared-name", "item_id": 1, "weight": 5, "timestamp_s": int(time.time())}
    with hosted_world(world_dir, world_config(world_dir, "second")) as (second, _):
        assert Mesh.find("second", world_dir) is not None
        assert Mesh.find("integration", world_dir) is not None
        assert second.url != mesh.url
        assert not set(second.state.ports) & set(mesh.state.ports)
        pids = {process.pid for process in second.processes()}
        assert pids
        assert not pids & {process.pid for process in mesh.processes()}
        appended = httpx.post(f"{second.url}/v1/events", json={"events": [event]}, trust_env=False)
        assert appended.json()["appended"] == 1
        assert rank(second.url, "shared-name") == 1
        assert rank(mesh.url, "shared-name") == 0
    assert members(second.state.mesh_id) == []
    assert [port for port in second.state.ports if is_listening(port)] == []
    assert Mesh.find("second", world_dir) is None
    assert not second.folders.short.exists()
    assert rank(mesh.url, "shared-name") == 0, "the other one goes on"
