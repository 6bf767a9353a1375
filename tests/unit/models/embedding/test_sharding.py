"""Shards and assembler together: any placement, any number of shards, any row type gives the bits of the one table."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import Placement, RankerConfig, RowType, TableBackend, TableConfig
from models.embedding.assemble import Assembler
from models.embedding.serving_rows import hot_rows, with_serving_rows
from models.embedding.tables import table_weight
from models.features import FeatureExtractor
from models.golden import Golden
from models.random_weights import TINY
from models.source import MemorySource
from models.stations import CandidateRanker, TableShard
from shared.errors import InvalidRequestError, WeightsError
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, JaggedIds
from shared.schema.stamp import Stamp
from tests.helpers.weights import random_weights

STAMP = Stamp("r", "random", "test", "0", 0.0)
KINDS: tuple[tuple[Placement, int], ...] = (
    ("table_wise", 0),
    ("row_wise", 0),
    ("row_wise", 5),
    ("column_wise", 0),
    ("replicated", 0),
)
IDS = st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=6)


def _config(kind: Placement, hot: int, row_type: RowType) -> RankerConfig:
    tables = tuple(
        TableConfig(name=table.name, placement=kind, hot_rows=hot, row_type=row_type)
        if table.name in TINY.candidate_tables
        else table
        for table in TINY.tables
    )
    return TINY.model_copy(update={"tables": tables})


@cache
def _source(kind: Placement, hot: int, row_type: RowType) -> MemorySource:
    return random_weights(_config(kind, hot, row_type), golden=False)


def _features(source: MemorySource, jagged: dict[str, list[list[int]]]) -> FeatureBatch:
    """Make a batch of arbitrary ids: duplicates, empty features, everything that lengths and rows can be."""
    num = {name: len(table_weight(source, name)) for name in TINY.candidate_tables}
    unique: dict[str, np.ndarray] = {}
    features: dict[str, JaggedIds] = {}
    num_candidates = min(len(ids) for ids in jagged.values())
    for feature in TINY.candidate_features:
        lists = [[row % num[feature.table] for row in ids] for ids in jagged[feature.name][:num_candidates]]
        flat = np.array([row for ids in lists for row in ids], np.int64)
        unique[feature.table], values = np.unique(flat, return_inverse=True)
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        features[feature.name] = JaggedIds(values.astype(np.int32), offsets)
    keys = np.arange(num_candidates, dtype=np.int64)
    return FeatureBatch(STAMP, keys, keys, unique, features, np.zeros((num_candidates, 3), np.float32), {})


def _pool(source: MemorySource, features: FeatureBatch, num_shards: int, backend: TableBackend) -> np.ndarray:
    config = RankerConfig.model_validate(source.json("model"))
    oov = {name: table_weight(source, name)[0] for name in config.candidate_tables}
    shards = [TableShard(source, shard, num_shards, backend) for shard in range(num_shards)]
    rows = [EmbeddingRows(STAMP, index, shard.lookup(features)) for index, shard in enumerate(shards)]
    return Assembler(config, oov, hot_rows(source, config)).pool(features, rows).values


def _single(source: MemorySource, features: FeatureBatch) -> np.ndarray:
    """Pool from the whole tables, without shards."""
    found = np.zeros((features.num_candidates, len(TINY.candidate_features), TINY.width), np.float32)
    for index, feature in enumerate(TINY.candidate_features):
        weight, ids = table_weight(source, feature.table), features.features[feature.name]
        for candidate in range(features.num_candidates):
            begin, end = ids.offsets[candidate : candidate + 2]
            rows = weight[features.unique_rows[feature.table][ids.values[begin:end]]]
            if len(rows):
                found[candidate, index] = np.add.reduceat(rows, [0], axis=0)[0] / np.float32(len(rows))
    return found


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize(("kind", "hot"), KINDS)
@given(items=IDS, genres=IDS, years=IDS)
@settings(max_examples=20, deadline=None)
def test_any_placement_gives_the_bits_of_the_single_table(
    kind: Placement,
    hot: int,
    num_shards: int,
    items: list[list[int]],
    genres: list[list[int]],
    years: list[list[int]],
) -> None:
    source = _source(kind, hot, "fp32")
    features = _features(source, {"item_id": items, "genres": genres, "year": years})
    np.testing.assert_array_equal(_pool(source, features, num_shards, "reference"), _single(source, features))


@pytest.mark.parametrize("row_type", ["fp16", "int8", "int4"])
@pytest.mark.parametrize(("kind", "hot"), KINDS)
def test_quantized_rows_give_the_bits_of_the_single_table_too(kind: Placement, hot: int, row_type: RowType) -> None:
    source = _source(kind, hot, row_type)
    ids = np.random.default_rng(1).integers(0, 10**6, (3, 30, 2))
    features = _features(source, dict(zip(("item_id", "genres", "year"), ids.tolist(), strict=True)))
    expected = _single(source, features)
    for num_shards in (1, 2, 4):
        for backend in ("reference", "fbgemm"):
            np.testing.assert_array_equal(_pool(source, features, num_shards, backend), expected)


@pytest.mark.parametrize("num_shards", [1, 3, 4])
@pytest.mark.parametrize(("kind", "hot"), KINDS)
@pytest.mark.parametrize("row", [41, 42, 43, 44, 47, 2**40, 2**63 - 1, -1, -2, -(2**63)])
def test_rows_outside_a_table_are_refused_with_limit_and_value(
    kind: Placement, hot: int, num_shards: int, row: int
) -> None:
    source = _source(kind, hot, "fp32")
    features = _features(source, {"item_id": [[1]], "genres": [[1]], "year": [[1]]})
    features.unique_rows["item"] = np.array([3, row], np.int64)
    refused = 0
    for index in range(num_shards):
        shard = TableShard(source, index, num_shards)
        if "item" in shard.num_bytes and (hot or shard.plan.owned("item", index, features.unique_rows["item"])[1]):
            with pytest.raises(InvalidRequestError, match=r"rows of table item must be in \[0, 41\)") as caught:
                shard.lookup(features)
            assert caught.value.context == {"field": "unique_rows.item", "limit": 41, "value": row}
            refused += 1
        else:
            shard.lookup(features)
    assert refused == (num_shards if hot or kind == "column_wise" else 1)


@pytest.mark.parametrize(("kind", "hot"), KINDS)
def test_a_missing_shard_leaves_row_0_where_it_would_have_given(kind: Placement, hot: int) -> None:
    source = _source(kind, hot, "fp32")
    config = RankerConfig.model_validate(source.json("model"))
    oov = {name: table_weight(source, name)[0] for name in config.candidate_tables}
    assembler = Assembler(config, oov, hot_rows(source, config))
    features = _features(source, {"item_id": [[row] for row in range(1, 30)], "genres": [[]] * 29, "year": [[]] * 29})
    whole = _single(source, features)[:, 0]
    rows = [EmbeddingRows(STAMP, shard, TableShard(source, shard, 2).lookup(features)) for shard in range(2)]
    halves = [assembler.pool(features, present).values[:, 0] for present in ([rows[0], None], [None, rows[1]])]
    for half in halves:
        assert ((half == whole) | (half == oov["item"])).all()
    # What one shard did not give, the other did.
    assert ((halves[0] == whole) | (halves[1] == whole)).all()


@pytest.mark.parametrize(
    ("kind", "hot", "row_type"), [("row_wise", 3, "int8"), ("column_wise", 0, "int4"), ("replicated", 0, "fp16")]
)
def test_a_quantized_model_answers_its_golden_request(kind: Placement, hot: int, row_type: RowType) -> None:
    """Oracle, shards and ranker read the same values, so a quantized model is exact against itself."""
    source = random_weights(_config(kind, hot, row_type))
    golden, extractor = Golden.from_weights(source), FeatureExtractor.from_weights(source)
    for shard in range(2):
        golden.check_shard(TableShard(source, shard, 2, "fbgemm"), extractor)
    golden.check_ranker(CandidateRanker.from_weights(source), extractor)


def test_quantized_tables_are_published_as_rows_and_as_values() -> None:
    plain, quantized = _source("row_wise", 0, "fp32"), _source("row_wise", 0, "int8")
    assert "rows/item" not in plain.groups
    assert quantized.groups["rows/item"]["rows"].shape == (41, TINY.width + 4)
    before, after = (table_weight(source, "item") for source in (plain, quantized))
    span = np.ptp(before, axis=1, keepdims=True)
    assert (np.abs(after - before).max(axis=1) > 0).all()
    assert (np.abs(after - before) < span / 200).all()
    assert TableShard(quantized, 0, 1).num_bytes["item"] == 41 * (TINY.width + 4)


@pytest.mark.parametrize(("kind", "hot"), KINDS)
def test_rows_in_files_give_the_same_bits(kind: Placement, hot: int, tmp_path: Path) -> None:
    source = _source(kind, hot, "int8")
    features = _features(source, {"item_id": [[1, 40], [7]], "genres": [[1], []], "year": [[2], [3]]})
    for shard in range(2):
        mapped = TableShard(source, shard, 2, map_dir=tmp_path).lookup(features)
        held = TableShard(source, shard, 2).lookup(features)
        assert mapped.keys() == held.keys()
        for name, rows in held.items():
            np.testing.assert_array_equal(mapped[name], rows)
    assert all(path.suffix == ".rows" for path in tmp_path.iterdir())


def test_hot_rows_need_traffic() -> None:
    source = random_weights(golden=False)
    source.documents["model"] = _config("row_wise", 2, "fp32").model_dump(mode="json")
    with pytest.raises(WeightsError, match="table item has hot rows: its traffic must have 41 counts, has none"):
        with_serving_rows(source)
    counts = {name: np.arange(len(table_weight(source, name)))[::-1] for name in TINY.candidate_tables}
    found = with_serving_rows(source, counts)
    assert found.groups["placement"]["item.hot"].tolist() == [0, 1]
    with pytest.raises(WeightsError):
        TableShard(source, 0, 1)
