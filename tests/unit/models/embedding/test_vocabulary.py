"""An id is served by its own row or by row 0, never by another id's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.source import MemorySource
from shared.errors import WeightsError

_KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)


@given(_KEYS, _KEYS)
def test_every_key_gets_its_own_row_or_row_0(known: list[int], asked: list[int]) -> None:
    vocabulary = Vocabulary.of(np.array(known, np.int64))
    row_of = {key: vocabulary.row(key) for key in known}
    assert sorted(set(row_of.values())) == list(range(1, len(set(known)) + 1))
    found = vocabulary.rows(np.array(asked, np.int64))
    assert found.tolist() == [row_of.get(key, OOV_ROW) for key in asked]


def test_rows_keep_the_shape_and_need_not_be_in_key_order() -> None:
    vocabulary = Vocabulary(np.array([-5, 3, 8], np.int64), np.array([2, 7, 1], np.int64))
    assert vocabulary.rows(np.array([[8, 4], [-5, 3]], np.int64)).tolist() == [[1, 0], [2, 7]]
    assert vocabulary.num_rows == 8
    assert len(vocabulary) == 3


def test_empty_vocabulary_knows_nothing() -> None:
    vocabulary = Vocabulary.of(np.zeros(0, np.int64))
    assert vocabulary.rows(np.array([0, 1], np.int64)).tolist() == [0, 0]
    assert vocabulary.num_rows == 1


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        ([1, 1], [1, 2], "strictly ascending"),
        ([2, 1], [1, 2], "strictly ascending"),
        ([1, 2], [1, 1], "distinct"),
        ([1, 2], [0, 1], "above 0"),
        ([1, 2], [1], "as many keys as rows"),
    ],
)
def test_broken_arrays_are_refused(keys: list[int], rows: list[int], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Vocabulary(np.array(keys, np.int64), np.array(rows, np.int64))


def test_from_weights_reads_what_tensors_gives_and_names_what_is_missing() -> None:
    vocabulary = Vocabulary.of(np.array([4, 9], np.int64))
    source = MemorySource("v", {"vocabulary": vocabulary.tensors("item")})
    assert Vocabulary.from_weights(source, "item").row(9) == vocabulary.row(9)
    with pytest.raises(WeightsError, match=r"no tensor user\.keys"):
        Vocabulary.from_weights(source, "user")
