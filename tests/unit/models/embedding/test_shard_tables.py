"""FBGEMM's look-up gives the bits of the plain gather."""

from __future__ import annotations

import numpy as np
import pytest

from models.config import TableBackend
from models.embedding.shard_tables import shard_tables

WIDTHS = {"item": (257, 32), "genre": (19, 32), "one": (1, 32)}


def _parts(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in WIDTHS.items()}


@pytest.mark.parametrize("num_ids", [0, 1, 2, 500])
def test_backends_give_the_same_bits(num_ids: int) -> None:
    parts = _parts(3)
    rng = np.random.default_rng(num_ids)
    ids = {name: rng.integers(0, len(part), num_ids) for name, part in parts.items()}
    ids["one"] = np.zeros(3, np.int64)
    got, expected = (shard_tables(parts, backend)(ids) for backend in ("fbgemm", "reference"))
    assert got.keys() == expected.keys()
    for name in parts:
        assert got[name].shape == (len(ids[name]), 32)
        np.testing.assert_array_equal(got[name], expected[name])


@pytest.mark.parametrize("backend", ["fbgemm", "reference"])
def test_last_row_and_duplicates_are_read_right(backend: TableBackend) -> None:
    parts = _parts(5)
    ids = {"item": np.array([256, 0, 256]), "genre": np.array([18]), "one": np.zeros(0, np.int64)}
    rows = shard_tables(parts, backend)(ids)
    np.testing.assert_array_equal(rows["item"], parts["item"][[256, 0, 256]])
    np.testing.assert_array_equal(rows["genre"][0], parts["genre"][18])


@pytest.mark.parametrize("backend", ["fbgemm", "reference"])
def test_look_up_owns_its_rows(backend: TableBackend) -> None:
    parts = _parts(7)
    expected = parts["item"][[4]].copy()
    gather = shard_tables(parts, backend)
    parts["genre"][:] = 0
    ids = {"item": np.array([4]), "genre": np.zeros(0, np.int64), "one": np.zeros(0, np.int64)}
    np.testing.assert_array_equal(gather(ids)["item"], expected)


def test_a_shard_without_tables_returns_nothing() -> None:
    assert shard_tables({}, "fbgemm")({}) == {}
