"""Binds the graph of one mesh: which deployments there are, with how many replicas, and who holds whose handle."""

from __future__ import annotations

import math
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.affinity import router_of
from cluster.config import ReplicaConfig
from cluster.names import deployment_name, station_configs
from cluster.priority import start_command
from cluster.scaling.serve_policy import serve_autoscaling
from cluster.stations import Embedding, Foundation, Ingress, Place, Preprocess, Ranking, Sequence, Speculative


def build(place: Place) -> Application:
    """Return the application that ``serve.run`` starts.

    Args:
        place: Configuration, and what was resolved for it: weights version, store.
    """
    replicas = station_configs(place.config)
    parts: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
        "preprocess": (Preprocess, ()),
        **{f"embedding:{shard}": (Embedding, (shard,)) for shard in range(place.config.embedding.num_shards)},
        "sequence": (Sequence, ()),
        "speculative": (Speculative, ()),
        **{f"ranking:{tier}": (Ranking, (tier,)) for tier in place.config.ranking},
    }
    if place.config.foundation is not None:
        parts["foundation"] = (Foundation, ())
    nodes = place.config.ray.num_nodes
    handles = {
        name: _deployment(cls, name, replicas[name], _start(place, name), nodes).bind(place, *args)
        for name, (cls, args) in parts.items()
    }
    front = _deployment(serve.ingress()(Ingress), "ingress", replicas["ingress"], _start(place, "ingress"), nodes)
    application: Application = front.bind(place, handles)
    return application


def _start(place: Place, station: str) -> dict[str, str]:
    yields = place.config.niceness_of(station) > 0
    return start_command(may_raise=place.niceness is not None, idle=place.idle_class, yields=yields)


def _deployment(
    cls: type[Any], station: str, config: ReplicaConfig, environment: dict[str, str], num_nodes: int
) -> Any:
    routing: dict[str, Any] = {}
    if station != "ingress":  # whose calls come from outside
        routing["request_router_config"] = router_of(station, config.replicas_max)
    if config.autoscaling is None:
        number: dict[str, Any] = {"num_replicas": config.replicas}
    else:
        number = {"autoscaling_config": serve_autoscaling(station, config.replicas, config.autoscaling)}
    if num_nodes > 1:  # left to itself Serve has put both replicas of a station on the node that died
        number["max_replicas_per_node"] = math.ceil(config.replicas_max / num_nodes)
    return serve.deployment(
        cls,
        **routing,
        **number,
        name=deployment_name(station),
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "runtime_env": environment},
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        # Serve looks this often whether a stopping replica is idle; its default of 2 s is most of a quick stop.
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=config.max_surge_percent,
        # Weights that do not load will not load the third time either.
        max_constructor_retry_count=2,
        # One line a call in every replica: the stations log failures, the ingress logs requests.
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
