"""A real mesh over the test world: weights published, processes started, histories loaded, ended at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.site import Site, free_port
from cluster.config import HttpConfig, MeshConfig, WeightsConfig
from cluster.histories import HistorySource, HistoryStore
from cluster.local import Mesh
from shared.userlog import RedisUserLog, connect
from shared.weights import WeightStore
from tests.helpers.world import publish_world, world_dataset


def world_config(folder: Path, name: str, **fields: Any) -> MeshConfig:
    """Return the default deployment under another name, on free ports, with the world's weights.

    Args:
        folder: Holds the weight store; made when it is not there.
        name: Name of the mesh.
        **fields: Sections that differ from the defaults.
    """
    version = publish_world(folder / "weights")
    weights = WeightsConfig(url=str(folder / "weights"), version=version)
    config = MeshConfig(name=name, weights=weights, **fields)
    return config.model_copy(update={"http": HttpConfig(port=free_port(config))})


@contextmanager
def hosted_world(folder: Path, config: MeshConfig) -> Iterator[tuple[Mesh, Site]]:
    """Start a mesh and load every user's profile and events before the test period; end it afterwards.

    Args:
        folder: Folder of run-time files.
        config: From ``world_config``.
    """
    with Mesh.start(config, var_dir=folder) as mesh:
        asyncio.run(_load(mesh, config))
        source = WeightStore(str(config.weights.url)).open(mesh.version)
        yield mesh, Site.of(mesh.url, config, mesh.state.config_digest, world_dataset(), source)


async def _load(mesh: Mesh, config: MeshConfig) -> None:
    dataset = world_dataset()
    client = connect(config.store.client.model_copy(update={"url": mesh.store_url, "topology": "single"}))
    try:
        store = HistoryStore(client, RedisUserLog(client, config.user_log()), config.name)
        source = HistorySource(
            dataset.name, dataset.provenance, dataset.split.test_start_s, config.user_log().max_events
        )
        await store.load(source, dataset)
    finally:
        await client.aclose()
