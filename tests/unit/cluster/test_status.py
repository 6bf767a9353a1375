"""Status: the controller's view joined with what the replicas say, kept for a second, never an exception."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.config import MeshConfig
from cluster.names import APP
from cluster.status import CACHE_S, MeshDirectory, Replies, deployments_of
from services.ingress.directory import DeploymentStatus
from shared.clock import ManualClock
from shared.userlog import StoreConfig


def details(*replicas: tuple[str, str, str], target: int = 1) -> dict[str, Any]:
    """Return instance details of (deployment, replica id, state)."""
    deployments: dict[str, Any] = {}
    for name, replica_id, state in replicas:
        entry = deployments.setdefault(name, {"target_num_replicas": target, "replicas": []})
        entry["replicas"].append({"replica_id": replica_id, "state": state, "pid": 7})
    return {"applications": {APP: {"deployments": deployments}}}


def by_name(deployments: list[DeploymentStatus]) -> dict[str, DeploymentStatus]:
    return {each.name: each for each in deployments}


class FakeInformant:
    def __init__(self) -> None:
        self.known: dict[str, Any] | None = details(("sequence", "a1", "RUNNING"))
        self.said: Replies = {"sequence-a1": {"replica": "sequence-a1", "version": "v1", "counters": {"encode_ok": 3}}}
        self.num_asked = 0

    async def details(self) -> Mapping[str, Any] | None:
        self.num_asked += 1
        return self.known

    async def replies(self) -> Replies:
        return self.said


def test_every_station_is_listed_before_serve_knows_any() -> None:
    found = deployments_of({}, {}, MeshConfig())
    assert [each.name for each in found][:2] == ["ingress", "preprocess"]
    assert all(each.replicas == [] for each in found)
    assert by_name(found)["ingress"].target == 2


def test_replicas_with_what_they_say() -> None:
    view = details(("embedding-1", "b", "RUNNING"), ("embedding-1", "a", "STARTING"), target=2)
    said: Replies = {"embedding-1-b": {"replica": "embedding-1-b", "version": "v1", "counters": {"rows": 5}}}
    station = by_name(deployments_of(view, said, MeshConfig()))["embedding:1"]
    assert station.target == 2
    starting, ready = station.replicas
    assert (starting.id, starting.state, starting.version, starting.counters) == ("embedding-1-a", "starting", None, {})
    assert (ready.id, ready.state, ready.version, ready.counters) == ("embedding-1-b", "ready", "v1", {"rows": 5})
    assert ready.pid == 7


@pytest.mark.parametrize("state", ["STOPPING", "STOPPED", "SOMETHING_NEW"])
def test_replicas_on_their_way_out_are_not_shown(state: str) -> None:
    view = details(("sequence", "a", state))
    assert by_name(deployments_of(view, {}, MeshConfig()))["sequence"].replicas == []


async def test_an_answer_is_kept_for_a_second() -> None:
    clock, informant = ManualClock(), FakeInformant()
    directory = MeshDirectory(MeshConfig(), informant, StoreConfig(), clock)
    first = await directory.deployments()
    assert by_name(first)["sequence"].replicas[0].counters == {"encode_ok": 3}
    await clock.advance(CACHE_S)
    await directory.deployments()
    assert informant.num_asked == 1
    await clock.advance(0.01)
    await directory.deployments()
    assert informant.num_asked == 2


async def test_the_last_answer_stands_while_the_controller_is_silent() -> None:
    clock, informant = ManualClock(), FakeInformant()
    directory = MeshDirectory(MeshConfig(), informant, StoreConfig(), clock)
    first = await directory.deployments()
    informant.known = None
    await clock.advance(10)
    assert await directory.deployments() == first
    informant.known = details(("sequence", "a2", "RUNNING"))
    assert by_name(await directory.deployments())["sequence"].replicas[0].id == "sequence-a2"  # asked again at once


async def test_a_store_that_is_out_of_reach_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}/0"
    status = await MeshDirectory(MeshConfig(), FakeInformant(), StoreConfig(url=url), ManualClock()).store()
    assert not status.healthy
    assert "secret" not in status.url
    assert status.kind == "embedded"


def test_why_a_replica_does_not_start_is_said_until_all_run() -> None:
    view = details(("embedding-0", "a", "STARTING"))
    entry = view["applications"][APP]["deployments"]["embedding-0"]
    entry["message"] = (
        "A replica failed to start with exception. Retrying. Error:\nTraceback:\n"
        "shared.errors.WeightsError: weights v1: tables/item.safetensors does not match its checksum"
    )
    found = by_name(deployments_of(view, {}, MeshConfig()))
    assert found["embedding:0"].reason.endswith("tables/item.safetensors does not match its checksum")
    assert found["embedding:1"].reason == ""
    entry["replicas"][0]["state"] = "RUNNING"
    assert by_name(deployments_of(view, {}, MeshConfig()))["embedding:0"].reason == ""
