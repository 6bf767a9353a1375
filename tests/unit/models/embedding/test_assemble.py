"""Pooling from shards: any number of shards gives the same bits; a missing one gives row 0."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.config import RankerConfig
from models.embedding.assemble import Assembler
from models.features import FeatureExtractor
from models.random_weights import TINY
from models.source import MemorySource
from models.stations import TableShard
from shared.errors import InvalidRequestError
from shared.hashing import EntityId
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from tests.helpers.weights import random_weights

_STAMP = Stamp("r", "random", "test", "0", 0.0)
_IDS: list[EntityId] = [1, 40, 7, "unknown", 13, 22, 21, 2**40]


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return random_weights()


@pytest.fixture(scope="module")
def features(source: MemorySource) -> FeatureBatch:
    return FeatureExtractor.from_weights(source).extract_ids(_IDS).stamped(_STAMP)


def _assembler(source: MemorySource) -> Assembler:
    return Assembler(TINY, {name: source.groups[f"tables/{name}"]["weight"][0] for name in TINY.candidate_tables})


def _rows(source: MemorySource, features: FeatureBatch, num_shards: int) -> list[EmbeddingRows]:
    return [
        EmbeddingRows(_STAMP, shard, TableShard(source, shard, num_shards).lookup(features))
        for shard in range(num_shards)
    ]


def test_any_number_of_shards_gives_the_same_bits(source: MemorySource, features: FeatureBatch) -> None:
    expected = _assembler(source).pool(features, _rows(source, features, 1))
    for num_shards in (2, 3, 7):
        found = _assembler(source).pool(features, _rows(source, features, num_shards))
        np.testing.assert_array_equal(found.values, expected.values)
        assert found.missing_shards == ()


def test_pooling_is_the_mean_of_the_rows_of_the_table(source: MemorySource, features: FeatureBatch) -> None:
    pooled = _assembler(source).pool(features, _rows(source, features, 2)).values
    catalog, vocabulary = source.groups["catalog"], source.groups["vocabulary"]
    for index, item in enumerate(_IDS):
        known = item if isinstance(item, int) and item <= 40 else None
        row = vocabulary["item.rows"][vocabulary["item.keys"].tolist().index(known)] if known else 0
        np.testing.assert_array_equal(pooled[index, 0], source.groups["tables/item"]["weight"][row])
        begin, end = catalog["genre_offsets"][known - 1 : known + 1] if known else (0, 0)
        genres = source.groups["tables/genre"]["weight"][catalog["genre_rows"][begin:end]]
        expected = genres.mean(axis=0) if len(genres) else np.zeros(TINY.width, np.float32)
        np.testing.assert_allclose(pooled[index, 1], expected, rtol=1e-6)


def test_a_missing_shard_gives_row_0_to_its_rows_only(source: MemorySource, features: FeatureBatch) -> None:
    rows = _rows(source, features, 2)
    whole = _assembler(source).pool(features, rows).values
    pooled = _assembler(source).pool(features, [rows[0], None])
    assert pooled.missing_shards == (1,)
    items = features.unique_rows["item"][features.features["item_id"].values]
    row_0 = source.groups["tables/item"]["weight"][0]
    for index, row in enumerate(items):
        np.testing.assert_array_equal(pooled.values[index, 0], row_0 if row % 2 else whole[index, 0])


def test_rows_that_do_not_fit_are_refused(source: MemorySource, features: FeatureBatch) -> None:
    rows = _rows(source, features, 2)
    short = dataclasses.replace(rows[0], rows=rows[0].rows | {"item": rows[0].rows["item"][:-1]})
    with pytest.raises(InvalidRequestError, match="shard 0 must give"):
        _assembler(source).pool(features, [short, rows[1]])


def test_a_shard_refuses_rows_outside_its_table(source: MemorySource, features: FeatureBatch) -> None:
    beyond = dataclasses.replace(features, unique_rows=features.unique_rows | {"item": np.array([41], np.int64)})
    with pytest.raises(InvalidRequestError, match=r"rows of table item must be in \[0, 41\), are 41 to 41"):
        TableShard(source, 0, 1).lookup(beyond)


def test_default_configuration_is_placed_as_documented() -> None:
    assert RankerConfig().table("item").placement == "row_wise"
