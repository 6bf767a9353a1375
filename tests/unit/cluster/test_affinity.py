"""Encodes of one user go to one replica of sequence: calls carry his key, and every router hashes it alike."""

from __future__ import annotations

from typing import Any, cast

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from cluster.affinity import router_of, user_key
from cluster.app import build
from cluster.config import MeshConfig
from cluster.connect import connect_stations
from cluster.names import station_configs
from cluster.routers import KeyedRouter
from cluster.stations import Place
from shared.clock import ManualClock
from shared.hashing import EntityId, canonical_id
from shared.schema.user import EncodeTask
from shared.userlog import StoreConfig
from tests.unit.cluster.fake_serve import FakeServeHandle


def _config(num_replicas: int) -> MeshConfig:
    return MeshConfig.model_validate({"sequence": {"replicas": {"replicas": num_replicas, "max_ongoing_requests": 64}}})


def _task(user: EntityId) -> EncodeTask:
    return EncodeTask("r", "v", user, "web", 10, 100.0)


def _router_config(num_replicas: int) -> Any:
    place = Place(_config(num_replicas), "v1", "/weights", StoreConfig(), "/plans", "/search")
    bound = cast(Any, build(place))._bound_deployment
    return bound.init_args[1]["sequence"]._bound_deployment._deployment_config.request_router_config


@pytest.mark.parametrize(("num_replicas", "keys"), [(1, ["", ""]), (3, ["7", "someone"])])
async def test_encodes_carry_their_user_where_there_is_a_choice(num_replicas: int, keys: list[str]) -> None:
    config = _config(num_replicas)
    serve = {name: FakeServeHandle() for name in station_configs(config) if name != "ingress"}
    sequence = connect_stations(config, cast(Any, serve), ManualClock()).sequence
    for user in ("7", "someone"):
        sequence.call("encode", _task(user)).cancel()
        sequence.call("forget", canonical_id(user)).cancel()  # to the replica that keeps what it is about
    assert [response.session_id for _, response in serve["sequence"].calls] == [key for key in keys for _ in range(2)]
    sequence.call("append", []).cancel()
    assert serve["sequence"].last.session_id == ""


def test_one_user_has_one_key_however_the_id_is_written() -> None:
    assert user_key(_task("7")) == user_key(_task(7)) == "7"


def test_sequence_alone_is_routed_by_key_and_only_with_several_replicas() -> None:
    assert router_of("sequence", 1).request_router_class == "cluster.routers.TwoChoicesRouter"
    assert router_of("preprocess", 2).request_router_class == "cluster.routers.TwoChoicesRouter"
    assert issubclass(_router_config(3).get_request_router_class(), ConsistentHashRouter)
    assert _router_config(3).request_router_kwargs == {"num_fallback_replicas": 3}
    assert not issubclass(_router_config(1).get_request_router_class(), ConsistentHashRouter)


def _ring(names: list[str]) -> Any:
    """Return the part of Serve's router that chooses, over some replicas."""
    router = cast(Any, KeyedRouter.__new__(KeyedRouter))
    router._num_virtual_nodes, router._num_fallback_replicas, router._deployment_id = 100, len(names), "sequence"
    deployment = DeploymentID("sequence", "rankmesh")
    router._rebuild_ring(frozenset(ReplicaID(name, deployment) for name in names))
    return router


def test_all_routers_choose_alike_and_a_lost_replica_moves_only_its_users() -> None:
    users = [user_key(_task(user)) for user in range(600)]
    first, second, fewer = _ring(["a", "b", "c"]), _ring(["c", "a", "b"]), _ring(["a", "c"])

    def chosen(router: Any) -> list[str]:
        return [router._lookup_ranked_replicas(user)[0].unique_id for user in users]

    assert chosen(first) == chosen(second)
    assert all(before == after for before, after in zip(chosen(first), chosen(fewer), strict=True) if before != "b")
    assert all(chosen(first).count(name) > 100 for name in "abc")
