"""The world of the chaos lab and the integration tests: a synthetic log, random weights, a mesh that serves them.

Random weights, because what is tested is that the mesh computes what the weights say, whatever they say: nothing has to
be fetched or trained, and the files are the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.site import Site, free_port
from cluster.config import MeshConfig
from cluster.histories import HistorySource, HistoryStore
from cluster.local import Mesh, Progress
from models.config import RankerConfig
from models.golden import add_golden
from models.random_weights import random_weights
from models.source import MemorySource
from shared.userlog import RedisUserLog, StoreConfig, connect
from shared.weights import WeightStore
from training.data.dataset import Dataset
from training.data.synthetic import SyntheticConfig, load_synthetic
from training.publish import golden_request
from training.samples import display_document, sample_document

VERSION = "20260101-000000-00000001"


@cache
def world_dataset() -> Dataset:
    """Return 40,000 impressions of 400 users over 1,200 ads: enough for requests of 1,000 candidates."""
    config = SyntheticConfig(num_events=40_000, num_users=400, num_ads=1_200, num_groups=60, activity=0.02)
    return load_synthetic(config, seed=3)


@cache
def world_weights() -> MemorySource:
    """Return a ranker of the default size with random weights over the same ads and users, and its golden request."""
    dataset = world_dataset()
    config = RankerConfig()
    source = random_weights(config, len(dataset.catalog), len(dataset.users), seed=1, version=VERSION)
    add_golden(source, golden_request(dataset, config.history_length))
    return source


def publish_world(folder: Path) -> str:
    """Write the weights to a store in ``folder``, if they are not there, and return their version."""
    store = WeightStore(folder)
    source, dataset = world_weights(), world_dataset()
    if source.version not in store.versions():
        with store.writer(source.version) as writer:
            for group, tensors in source.groups.items():
                writer.add_tensors(group, tensors)
            for name, document in source.documents.items():
                writer.add_json(name, document)
            writer.add_json("samples", sample_document(dataset))
            writer.add_json("display", display_document(dataset))
            writer.commit()
    return source.version


def world_config(folder: Path, name: str, **fields: Any) -> MeshConfig:
    """Return the default deployment under another name, on free ports, with the world's weights.

    Args:
        folder: Holds the weight store; made when it is not there.
        name: Name of the mesh.
        **fields: Sections that differ from the defaults.
    """
    return with_world(folder, MeshConfig(name=name, **fields))


def with_world(folder: Path, config: MeshConfig) -> MeshConfig:
    """Return a deployment on free ports, with the world's weights in a store below ``folder``."""
    version = publish_world(folder / "weights")
    weights = config.weights.model_copy(update={"url": str(folder / "weights"), "version": version})
    http = config.http.model_copy(update={"port": free_port(config)})
    return config.model_copy(update={"weights": weights, "http": http})


@contextmanager
def hosted_world(folder: Path, config: MeshConfig, on_progress: Progress | None = None) -> Iterator[tuple[Mesh, Site]]:
    """Start a mesh and load every user's profile and events before the test period; end it afterwards.

    Args:
        folder: Folder of run-time files.
        config: From ``world_config`` or ``with_world``.
        on_progress: Told in a few words what is being done.
    """
    with Mesh.start(config, var_dir=folder, on_progress=on_progress) as mesh:
        asyncio.run(load_histories(mesh, config))
        source = WeightStore(str(config.weights.url)).open(mesh.version)
        yield mesh, Site.of(mesh.url, config, mesh.state.config_digest, world_dataset(), source)


async def load_histories(mesh: Mesh, config: MeshConfig) -> None:
    """Put every user's profile and events before the test period into a mesh's store; again changes nothing."""
    dataset = world_dataset()
    client = connect(store_config(mesh, config))
    try:
        store = HistoryStore(client, RedisUserLog(client, config.user_log()), config.name)
        source = HistorySource(
            dataset.name, dataset.provenance, dataset.split.test_start_s, config.user_log().max_events
        )
        await store.load(source, dataset)
    finally:
        await client.aclose()


def store_config(mesh: Mesh, config: MeshConfig) -> StoreConfig:
    """Return how to reach the store of a running mesh."""
    return config.store.client.model_copy(update={"url": mesh.store_url, "topology": "single"})
