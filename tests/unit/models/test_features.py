"""What candidates carry, against a plain Python reference: one candidate, one id at a time, to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from models.config import FeatureConfig, RankerConfig, TableConfig
from models.embedding.assemble import Assembler
from models.embedding.tables import table_weight
from models.features import FeatureExtractor
from models.oracle import Oracle
from models.random_weights import GENRES, TINY
from models.stations import CandidateRanker, TableShard
from shared.errors import InvalidRequestError
from shared.hashing import EntityId
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from shared.wire import CandidateBatch, columns_of
from tests.helpers.weights import random_weights

BOUNDS = (-1.0, 0.1, 0.7)
CARRYING = RankerConfig.model_validate(
    {
        **TINY.model_dump(),
        "tables": [
            *TINY.tables,
            TableConfig(name="tag", num_rows=17, placement="row_wise"),
            TableConfig(name="price", num_rows=len(BOUNDS) + 2),
        ],
        "candidate_features": [
            FeatureConfig(name="item_id", table="item"),
            FeatureConfig(name="genres", table="genre", ids_max=3),
            FeatureConfig(name="year", table="year"),
            FeatureConfig(name="tags", table="tag", ids_max=2),
            FeatureConfig(name="brands", table="tag", ids_max=2),
            FeatureConfig(name="price", table="price", number_bounds=BOUNDS),
        ],
    }
)
SOURCE = random_weights(CARRYING)
EXTRACTOR = FeatureExtractor.from_weights(SOURCE)
ORACLE = Oracle.from_weights(SOURCE)
STAMP = Stamp("r", SOURCE.version, "preprocess", "preprocess-0", 0.0)

_IDS = st.integers(0, 2**63 - 1) | st.sampled_from([*GENRES, "x", "1991", "7"]) | st.integers(1985, 2000)
_WEIGHTS = st.sampled_from([0.0, -0.0, 0.5, 0.1, -3.0, 1e30])


@st.composite
def _value(draw: st.DrawFn) -> Any:
    ids = draw(st.lists(_IDS, max_size=6))
    if draw(st.booleans()):
        return ids
    return {"ids": ids, "weights": draw(st.lists(_WEIGHTS, min_size=len(ids), max_size=len(ids)))}


_NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [float(np.float32(bound)) for bound in BOUNDS]
)
_ROWS = st.fixed_dictionaries(
    {}, optional={"genres": _value(), "year": _value(), "tags": _value(), "brands": _value(), "price": _NUMBERS}
)
_REQUESTS = st.lists(st.tuples(st.integers(0, 60) | st.sampled_from(["x", "unknown"]), _ROWS), min_size=1, max_size=12)


def weighted_alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write out the weight 1 of ids without one where another candidate of the feature gives weights."""
    given_ = {name for row in rows for name, value in row.items() if isinstance(value, dict)}
    return [
        {
            name: {"ids": value, "weights": [1.0] * len(value)} if name in given_ and isinstance(value, list) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def rows_of(features: FeatureBatch, name: str, candidate: int) -> list[int]:
    table = next(feature.table for feature in CARRYING.candidate_features if feature.name == name)
    ids = features.features[name]
    positions = ids.values[ids.offsets[candidate] : ids.offsets[candidate + 1]]
    found: list[int] = features.unique_rows[table][positions].tolist()
    return found


@given(_REQUESTS)
@settings(max_examples=200, deadline=None)
def test_rows_equal_the_plain_reference(requests: list[tuple[EntityId, dict[str, Any]]]) -> None:
    ids, rows = [id_ for id_, _ in requests], [row for _, row in requests]
    features = EXTRACTOR.extract(CandidateBatch.of(ids, columns_of(rows))).stamped(STAMP)
    for position, (id_, row) in enumerate(zip(ids, weighted_alike(rows), strict=True)):
        price = {"price": float(np.float32(row["price"]))} if "price" in row else {}
        expected = ORACLE.candidate_rows(id_, {**row, **price})
        assert {name: rows_of(features, name, position) for name in expected} == expected
    for unique in features.unique_rows.values():
        assert bool((np.diff(unique) > 0).all())
    for name, number in features.num_oov.items():
        assert number == sum(rows_of(features, name, place).count(0) for place in range(len(ids)))


def test_what_is_carried_reaches_the_scores_as_the_oracle_says() -> None:
    ids: list[EntityId] = [1, 2, "new", 3]
    rows: list[dict[str, Any]] = [
        {"tags": [5, "x"], "price": 2.0},
        {},
        {"genres": ["Drama"], "year": [1991]},
        {"tags": {"ids": [1, 2, 3], "weights": [0.1, 0.9, 0.5]}},
    ]
    features = EXTRACTOR.extract(CandidateBatch.of(ids, columns_of(rows))).stamped(STAMP)
    shards = [EmbeddingRows(STAMP, index, TableShard(SOURCE, index, 2).lookup(features)) for index in range(2)]
    ranking = CandidateRanker.from_weights(SOURCE).rank(features, None, shards, None, "full", 4)
    arguments = (9, ids, UserHistory.empty(), "web", 0, "full", 4)
    answer = ORACLE.rank(*arguments, cold_start=True, carried=weighted_alike(rows))
    without = ORACLE.rank(*arguments, cold_start=True)
    np.testing.assert_allclose(ranking.scores, answer.scores[ranking.order], atol=1e-6)
    assert ranking.order.tolist() == answer.order.tolist()
    assert abs(answer.scores - without.scores)[[0, 2, 3]].min() > 1e-6, "and it matters"
    np.testing.assert_array_equal(
        answer.scores[1], ORACLE.rank(*arguments, cold_start=True, carried=[{}] * 4).scores[1]
    )


def test_candidates_without_ids_pool_to_nothing_and_without_a_number_to_row_0() -> None:
    features = EXTRACTOR.extract_ids([1]).stamped(STAMP)
    oov = {name: table_weight(SOURCE, name)[0] for name in CARRYING.candidate_tables}
    shards = [EmbeddingRows(STAMP, 0, TableShard(SOURCE, 0, 1).lookup(features))]
    pooled = Assembler(CARRYING, oov).pool(features, shards).values[0]
    np.testing.assert_array_equal(pooled[3:5], 0)
    np.testing.assert_array_equal(pooled[5], oov["price"])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"unheard": [1]}, r"features\.unheard is not a feature of the model, there are genres, year, tags"),
        ({"item_id": [1]}, r"features\.item_id is not a feature"),
        ({"tags": 1.0}, r"features\.tags must be ids, are numbers"),
        ({"price": [1]}, r"features\.price must be numbers, are ids"),
    ],
)
def test_features_that_the_model_does_not_take_are_refused(features: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        EXTRACTOR.extract(CandidateBatch.of([1], columns_of([features])))
    assert {"field", "limit", "value"} <= caught.value.context.keys()


def test_a_number_that_is_not_given_is_missing() -> None:
    batch = CandidateBatch.of([1, 2], columns_of([{"price": 5.0}, {"price": math.nan}]))
    features = EXTRACTOR.extract(batch).stamped(STAMP)
    assert [rows_of(features, "price", place) for place in range(2)] == [[4], [0]]


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"name": "price", "table": "tag", "number_bounds": (1.0,)}, "must have num_rows 3 for the bounds of price"),
        ({"name": "price", "table": "price", "number_bounds": (2.0, 1.0)}, "must ascend"),
        ({"name": "year", "table": "tag"}, "needs a vocabulary"),
        ({"name": "tags", "table": "tag"}, "distinct names"),
    ],
)
def test_features_and_their_tables_must_agree(feature: dict[str, Any], message: str) -> None:
    document = CARRYING.model_dump()
    kept = [each for each in document["candidate_features"] if each["name"] not in ("year", "price")]
    with pytest.raises(ValidationError, match=message):
        RankerConfig.model_validate({**document, "candidate_features": [*kept, feature]})
