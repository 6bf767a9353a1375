"""The graph that Serve is given: every station, with the settings of the configuration."""

from __future__ import annotations

import pickle
from typing import Any, cast

from cluster.app import build
from cluster.config import MeshConfig
from cluster.connect import connect_stations
from cluster.failures import start_failure, why_not
from cluster.names import deployment_name, station_configs
from cluster.stations import Place
from shared.clock import ManualClock
from shared.userlog import StoreConfig
from tests.unit.cluster.fake_serve import FakeServeHandle

CONFIG = MeshConfig.model_validate(
    {
        "embedding": {"num_shards": 3, "replicas": {"replicas": 2, "num_cpus": 0.5}},
        "preprocess": {"replicas": {"max_surge_percent": 0, "graceful_shutdown_timeout_s": 7}},
        "edges": {"preprocess.extract": "value"},
    }
)
PLACE = Place(CONFIG, "v1", "/weights", StoreConfig(), "/plans", "/search")


def deployments(place: Place = PLACE) -> dict[str, Any]:
    """Return Serve name -> deployment of the bound graph."""
    found: dict[str, Any] = {}

    def visit(application: Any) -> None:
        bound = application._bound_deployment
        found[bound.name] = bound
        for argument in bound.init_args:
            if isinstance(argument, dict):
                for inner in argument.values():
                    visit(inner)

    visit(build(place))
    return found


def test_every_station_is_deployed() -> None:
    assert set(deployments()) == {deployment_name(name) for name in station_configs(CONFIG)}


def test_settings_reach_serve() -> None:
    found = deployments()
    shard = found["embedding-2"]
    assert shard.num_replicas == 2
    assert shard.ray_actor_options["num_cpus"] == 0.5
    assert shard._deployment_config.health_check_period_s == 1.0
    assert shard._deployment_config.max_surge_percent == 100
    assert shard._deployment_config.max_queued_requests == 512
    preprocess = found["preprocess"]._deployment_config
    assert (preprocess.max_surge_percent, preprocess.graceful_shutdown_timeout_s) == (0, 7)
    assert found["ranking-full"].max_ongoing_requests == 32


def test_replicas_are_spread_over_several_nodes() -> None:
    document = {**CONFIG.model_dump(mode="json"), "ray": {"num_nodes": 3}, "http": {"ingress": "proxy"}}
    config = MeshConfig.model_validate(document)
    found = deployments(Place(config, "v1", "/weights", StoreConfig(), "/plans", "/search"))
    assert {each._replica_config.max_replicas_per_node for each in found.values()} == {1}
    assert {each._replica_config.max_replicas_per_node for each in deployments().values()} == {None}


def test_a_mesh_without_foundation_workers() -> None:
    config = MeshConfig.model_validate({"foundation": None})
    bound = cast(Any, build(Place(config, "v1", "/weights", StoreConfig(), "/plans", "/search")))._bound_deployment
    assert "foundation" not in bound.init_args[1]
    handles = {name: cast(Any, FakeServeHandle()) for name in bound.init_args[1]}
    assert connect_stations(config, handles, ManualClock()).foundation is None


def test_what_replicas_are_told_travels() -> None:
    assert pickle.loads(pickle.dumps(PLACE)) == PLACE


async def test_calls_travel_as_the_configuration_says() -> None:
    serve = {name: FakeServeHandle() for name in station_configs(CONFIG) if name != "ingress"}
    stations = connect_stations(CONFIG, cast(Any, serve), ManualClock())
    assert [handle.name for handle in stations.embedding] == ["embedding:0", "embedding:1", "embedding:2"]
    calls = {"preprocess": "extract", "embedding:2": "lookup", "sequence": "append", "ranking:light": "rank"}
    handles = {handle.name: handle for handle in stations.all()}
    by_reference = {}
    for name, method in calls.items():
        call = handles[name].call(method)
        by_reference[name] = serve[name].last.by_reference
        call.cancel()
    assert by_reference == {"preprocess": False, "embedding:2": True, "sequence": False, "ranking:light": True}


NESTED = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:rankmesh:sequence.initialize_and_get_metadata() (pid=1)
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/code/cluster/stations.py", line 134, in __init__
RuntimeError: Error(s) in loading state_dict
The above exception was the direct cause of the following exception:
shared.errors.WeightsError: dense tensors of weights v1 do not fit their model: Error(s):
    Missing key(s)"""


def test_the_reason_is_found_in_nested_tracebacks() -> None:
    waiting = "Deployment 'ingress' has 2 replicas that take long.\nThis may be caused by a slow __init__."
    reason = why_not({"ingress": waiting, "sequence": NESTED, "preprocess": ""})
    assert (
        reason == "sequence: shared.errors.WeightsError: dense tensors of weights v1 do not fit their model: Error(s):"
    )


def test_what_only_waits_has_not_failed() -> None:
    assert start_failure("Deployment 'a' has 2 replicas that take long.") == start_failure("") == ""
    assert start_failure(f"A replica failed to start with exception. Retrying. Error:\n{NESTED}").startswith("shared.")
    assert "hunter2" not in start_failure("OSError: cannot read redis://:hunter2@host/0")


def test_without_an_exception_every_station_that_is_late_is_named() -> None:
    assert why_not({"a": "no\nnode has enough cores", "b": ""}) == "a: node has enough cores; b: not ready"
