"""Gives the ingress its handles, each call travelling as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.affinity import keys_of
from cluster.config import EDGES, MeshConfig, Transport
from cluster.handles import RayHandle
from cluster.names import station_configs
from services.ingress.job import Stations
from shared.breaker import Breakers
from shared.clock import Clock


def connect_stations(config: MeshConfig, handles: Mapping[str, DeploymentHandle[Any]], clock: Clock) -> Stations:
    """Wrap the Serve handles of a mesh.

    Args:
        config: Says how each call travels.
        handles: Station name, e.g. ``embedding:1`` -> its Serve handle.
        clock: Time of the breakers.
    """
    replicas = station_configs(config)
    ingress = config.ingress.service
    breakers = {name: Breakers(name, ingress.breaker, clock, ingress.limit_ms(name) / 1e3) for name in handles}
    wrapped = {
        name: RayHandle(
            name,
            handle,
            _transports(config, name),
            config.ray.inline_bytes_max,
            breakers[name],
            keys=keys_of(name, replicas[name].replicas_max),
            waits_for_first=replicas[name].replicas_min == 0,
        )
        for name, handle in handles.items()
    }
    return Stations(
        preprocess=wrapped["preprocess"],
        sequence=wrapped["sequence"],
        embedding=tuple(wrapped[f"embedding:{shard}"] for shard in range(config.embedding.num_shards)),
        speculative=wrapped["speculative"],
        ranking={tier: wrapped[f"ranking:{tier}"] for tier in config.ranking},
        foundation=wrapped.get("foundation"),
        breakers=breakers,
    )


def _transports(config: MeshConfig, station: str) -> dict[str, Transport]:
    prefix = f"{station.partition(':')[0]}."
    methods = [edge.removeprefix(prefix) for edge in EDGES if edge.startswith(prefix)]
    return {method: config.transport(station, method) for method in methods}
