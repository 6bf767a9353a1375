"""Serve's own routers with breakers: real ones of Ray, over replicas that a test makes up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.exceptions import ReplicaUnavailableError

from cluster.affinity import router_of
from shared.breaker import BreakerConfig, Breakers, Trip
from shared.clock import ManualClock

STATION = DeploymentID("sequence", "rankmesh")


class FakeReplica:
    """What a router sees of a replica."""

    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = 100
    node_id = availability_zone = None

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, STATION)
        self.is_silent = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.is_silent:
            await asyncio.sleep(deadline_s)
        return 0


class Routed:
    """The router of calls of ``sequence`` over some replicas, made as Serve makes it, with breakers."""

    def __init__(self, num_replicas_max: int) -> None:
        config = router_of("sequence", num_replicas_max)
        cls: Any = config.get_request_router_class()
        self.clock = ManualClock()
        self.breakers = Breakers("sequence", BreakerConfig(failures=1), self.clock, limit_s=0.3)
        self.router = cls(
            deployment_id=STATION,
            handle_source=DeploymentHandleSource.REPLICA,
            self_actor_id="a",
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(**config.request_router_kwargs)
        self.replicas = {name: FakeReplica(name) for name in "abc"}
        self.update()
        self.router.breakers = self.breakers

    def update(self) -> None:
        self.router.update_replicas(list(self.replicas.values()))

    async def route(self, key: str = "", only: str | None = None) -> str:
        """Return where a call goes, as Serve's code decides it."""
        metadata = RequestMetadata(request_id="r", internal_request_id=f"{key}{id(object())}", session_id=key)
        trip = Trip(self.breakers, only)
        pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
        with trip.being_made():
            choosing = asyncio.create_task(self.router._choose_replica_for_request(pending))
        replica = await choosing
        name: str = replica.replica_id.unique_id
        assert trip._replica == name
        return name

    async def silence(self, name: str) -> None:
        self.breakers.sent(name)
        sent_s = self.clock.monotonic_s()
        await self.clock.advance(0.3)
        self.breakers.given_up(name, sent_s)
        assert name in self.breakers.open


KEYED, UNKEYED = 3, 1


@pytest.fixture(params=[UNKEYED, KEYED], ids=["the less busy of two", "by key"])
async def routed(request: pytest.FixtureRequest) -> Routed:
    return Routed(request.param)


async def test_a_silent_replica_gets_no_call_but_those_that_try_it(routed: Routed) -> None:
    keys = [f"user-{number}" for number in range(60)]
    before = [await routed.route(key) for key in keys]
    assert set(before) == {"a", "b", "c"}
    await routed.silence("b")
    during = [await routed.route(key) for key in keys]
    assert set(during) == {"a", "c"}
    assert [await routed.route(key, only="b") for key in keys] == ["b"] * 60
    routed.breakers.answered("b", routed.clock.monotonic_s())
    assert {await routed.route(key) for key in keys} == {"a", "b", "c"}


async def test_a_call_that_tries_goes_to_nobody_else(routed: Routed) -> None:
    await routed.silence("b")
    trip = Trip(routed.breakers, "b")
    metadata = RequestMetadata(request_id="r", internal_request_id="i")
    with trip.being_made():
        refused = asyncio.create_task(
            routed.router._choose_replica_for_request(PendingRequest([], {}, metadata), is_retry=True)
        )
        gone = asyncio.create_task(Routed.route(routed, only="d"))
    trip.sent_to("b")
    with pytest.raises(ReplicaUnavailableError):
        await refused
    assert routed.breakers.open == [], "who refuses answers"
    with pytest.raises(ReplicaUnavailableError):
        await gone


async def test_users_of_replicas_that_answer_stay_where_they_are() -> None:
    routed = Routed(KEYED)
    keys = [f"user-{number}" for number in range(60)]
    before = {key: await routed.route(key) for key in keys}
    await routed.silence("b")
    after = {key: await routed.route(key) for key in keys}
    assert all(after[key] == name for key, name in before.items() if name != "b")


async def test_where_all_are_silent_a_call_goes_all_the_same(routed: Routed) -> None:
    for name in "abc":
        await routed.silence(name)
    assert await routed.route("user") in "abc"


async def test_a_replica_that_is_gone_is_forgotten(routed: Routed) -> None:
    for name in "ab":
        await routed.silence(name)
    del routed.replicas["a"]
    routed.update()
    assert routed.breakers.open == ["b"]
    routed.router.on_replica_actor_died(routed.replicas["b"].replica_id)
    assert routed.breakers.open == []


async def test_without_breakers_they_choose_as_serve_does(routed: Routed) -> None:
    await routed.silence("b")
    routed.router.breakers = None
    assert "b" in {await routed.route(f"user-{number}") for number in range(60)}
