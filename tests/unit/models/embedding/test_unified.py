"""Unified tables: rows from hashes, chunks side by side, and one look-up for training and serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from models.embedding.unified import INIT_BOUND, UnifiedConfig, UnifiedLookup, UnifiedRows, UnifiedTable
from models.embedding.vocabulary import Vocabulary

CONFIG = UnifiedConfig(num_rows=101, width=4, num_tables=2, chunks={"user": 3, "item": 2, "zip": 1})
KEYS = np.array([0, 1, -5, 2**63 - 1, 17, 17], np.int64)


def test_rows_lie_in_the_tables_that_the_chunks_were_dealt() -> None:
    rows = UnifiedRows(CONFIG)
    tables = {feature: rows.rows(feature, KEYS) // 101 for feature in CONFIG.chunks}
    assert all((tables["user"] == [0, 1, 0]).ravel())
    assert all((tables["item"] == [1, 0]).ravel())
    assert all((tables["zip"] == [1]).ravel())


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    st.integers(2, 1_000),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_hashed_rows_are_never_the_out_of_vocabulary_row(
    ids: list[int], num_rows: int, chunks: int, tables: int
) -> None:
    config = UnifiedConfig(num_rows=num_rows, width=1, num_tables=tables, chunks={"f": chunks})
    rows = UnifiedRows(config).rows("f", np.array(ids, np.int64))
    assert rows.shape == (len(ids), chunks)
    assert ((rows >= 0) & (rows < config.num_rows_total)).all()
    assert (rows % num_rows != 0).all()


def test_rows_of_a_feature_do_not_depend_on_the_others() -> None:
    alone = UnifiedConfig(num_rows=101, width=4, chunks={"item": 2})
    many = UnifiedConfig(num_rows=101, width=4, chunks={"user": 3, "item": 2})
    np.testing.assert_array_equal(UnifiedRows(alone).rows("item", KEYS), UnifiedRows(many).rows("item", KEYS))


def test_features_and_chunks_have_salts_of_their_own() -> None:
    config = UnifiedConfig(num_rows=10_007, width=1, chunks={"user": 2, "item": 1})
    keys = np.arange(5_000, dtype=np.int64)
    rows = UnifiedRows(config)
    user, item = rows.rows("user", keys), rows.rows("item", keys)
    for one, two in ((user[:, 0], user[:, 1]), (user[:, 0], item[:, 0])):
        assert np.mean(one == two) < 0.002
    # Two ids share one chunk now and then, both chunks hardly ever.
    assert len(np.unique(user[:, 0])) < 4_100
    assert len(np.unique(user, axis=0)) > 4_995


def test_training_and_serving_read_the_same_bits() -> None:
    table = UnifiedTable(CONFIG, torch.Generator().manual_seed(3))
    lookup = UnifiedLookup(UnifiedRows(CONFIG), table.weight.detach().numpy())
    for feature in CONFIG.chunks:
        served = lookup.lookup(feature, KEYS)
        trained = table(torch.from_numpy(lookup.rows.rows(feature, KEYS))).detach().numpy()
        assert served.shape == (len(KEYS), CONFIG.feature_width(feature))
        np.testing.assert_array_equal(served, trained)
        assert lookup.lookup(feature, KEYS[:0]).shape == (0, CONFIG.feature_width(feature))


def test_chunks_are_concatenated_in_order() -> None:
    weight = np.arange(202 * 4, dtype=np.float32).reshape(202, 4)
    rows = UnifiedRows(CONFIG)
    served = UnifiedLookup(rows, weight).lookup("user", KEYS)
    chunks = rows.rows("user", KEYS)
    for index in range(len(KEYS)):
        np.testing.assert_array_equal(served[index], np.concatenate([weight[row] for row in chunks[index]]))


def test_unknown_ids_get_row_0_of_their_table_and_are_counted_by_feature() -> None:
    rows = UnifiedRows(CONFIG, {"user": Vocabulary.of(np.array([0, 17], np.int64))})
    found = rows.rows("user", KEYS)
    np.testing.assert_array_equal(found[1:4], np.broadcast_to([0, 101, 0], (3, 3)))
    assert (found[[0, 4, 5]] % 101 != 0).all()
    rows.rows("item", KEYS)
    rows.rows("user", KEYS[:2])
    assert rows.num_oov == {"user": 4, "item": 0, "zip": 0}


def test_rows_start_within_the_bound_and_learn() -> None:
    table = UnifiedTable(CONFIG)
    assert 0.9 * INIT_BOUND < float(table.weight.detach().abs().max()) <= INIT_BOUND
    table(torch.tensor([[5, 7, 5]])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum(dim=1)[[5, 7]].tolist() == [8.0, 4.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValidationError, match="chunks must be at least 1"):
        UnifiedConfig(num_rows=10, width=2, chunks={"user": 0})
    with pytest.raises(ValidationError):
        UnifiedConfig(num_rows=1, width=2, chunks={"user": 1})
    with pytest.raises(ValueError, match=r"must be of features .*'zip'\], has \['year'\]"):
        UnifiedRows(CONFIG, {"year": Vocabulary.of(KEYS)})
    with pytest.raises(ValueError, match=r"must be \(202, 4\), is \(101, 4\)"):
        UnifiedLookup(UnifiedRows(CONFIG), np.zeros((101, 4), np.float32))
    with pytest.raises(KeyError):
        UnifiedRows(CONFIG).rows("year", KEYS)
