"""The world of the integration and chaos tests: a synthetic log and a model of random weights over its items.

Random weights, because what is tested is that the mesh computes what the weights say, whatever they say: nothing has to
be fetched or trained, and the files are the same on every machine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from models.config import RankerConfig
from models.golden import add_golden
from models.random_weights import random_weights
from models.source import MemorySource
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
