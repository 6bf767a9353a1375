"""Attributes of items, known and unknown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.embedding.catalog import ItemCatalog
from models.source import MemorySource
from shared.errors import WeightsError

_GENRES = {3: [1, 2], 5: [], 9: [4], 12: [2, 3, 1]}


def _catalog() -> ItemCatalog:
    keys = np.array(sorted(_GENRES), np.int64)
    flat = np.array([row for key in sorted(_GENRES) for row in _GENRES[key]], np.int64)
    offsets = np.cumsum([0, *(len(_GENRES[key]) for key in sorted(_GENRES))], dtype=np.int64)
    counters = (keys[:, None] + [0.25, 0.5]).astype(np.float32)
    return ItemCatalog(keys, flat, offsets, keys + 100, keys + 200, counters)


@given(st.lists(st.sampled_from([*_GENRES, 0, 4, 99, -7]), max_size=12))
def test_attributes_equal_a_dictionary(asked: list[int]) -> None:
    attributes = _catalog().attributes(np.array(asked, np.int64))
    for index, key in enumerate(asked):
        begin, end = attributes.genre_offsets[index : index + 2]
        assert attributes.genre_rows[begin:end].tolist() == _GENRES.get(key, [])
        assert attributes.year_rows[index] == (key + 100 if key in _GENRES else 0)
        assert attributes.group_keys[index] == (key + 200 if key in _GENRES else 0)
        assert attributes.counters[index].tolist() == ([key + 0.25, key + 0.5] if key in _GENRES else [0.0, 0.0])
        assert attributes.known[index] == (key in _GENRES)
    assert attributes.genre_offsets[-1] == len(attributes.genre_rows)


def test_empty_catalog_knows_nothing() -> None:
    nothing = np.zeros(0, np.int64)
    counters = np.zeros((0, 3), np.float32)
    catalog = ItemCatalog(nothing, nothing, np.zeros(1, np.int64), nothing, nothing, counters)
    attributes = catalog.attributes(np.array([1, 2]))
    assert attributes.counters.shape == (2, 3)
    assert attributes.genre_offsets.tolist() == [0, 0, 0]
    assert not attributes.known.any()


def test_round_trip_through_weights() -> None:
    catalog = ItemCatalog.from_weights(MemorySource("v", {"catalog": _catalog().tensors()}))
    assert catalog.attributes(np.array([12])).genre_rows.tolist() == [2, 3, 1]
    assert len(catalog) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_keys": np.array([3, 3, 9, 12])}, "strictly ascending"),
        ({"year_rows": np.array([1])}, "describe 4 items"),
        ({"genre_offsets": np.array([0, 2, 2, 3, 7])}, "rise from 0 to 6"),
        ({"genre_offsets": np.array([0, 3, 2, 3, 6])}, "rise from 0 to 6"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        ItemCatalog(**(_catalog().tensors() | change))
