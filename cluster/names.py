"""The stations of a mesh and what Ray Serve calls them."""

from __future__ import annotations

from cluster.config import MeshConfig, ReplicaConfig

APP = "rankmesh"
"""Name of the one Serve application; a mesh has a Ray cluster of its own."""


def deployment_name(station: str) -> str:
    """Return the Serve name of a station: ``embedding:1`` -> ``embedding-1``."""
    return station.replace(":", "-")


def station_name(deployment: str) -> str:
    """Return the station of a Serve name: ``embedding-1`` -> ``embedding:1``."""
    return deployment.replace("-", ":", 1)


def station_configs(config: MeshConfig) -> dict[str, ReplicaConfig]:
    """Return every station of a mesh with its replicas, in the order of a request, the ingress first."""
    stations = {"ingress": config.ingress.replicas, "preprocess": config.preprocess.replicas}
    stations |= {f"embedding:{shard}": config.embedding.replicas for shard in range(config.embedding.num_shards)}
    stations |= {"sequence": config.sequence.replicas, "speculative": config.speculative.replicas}
    stations |= {f"ranking:{tier}": part.replicas for tier, part in config.ranking.items()}
    if config.foundation is not None:
        stations["foundation"] = config.foundation.replicas
    return stations
