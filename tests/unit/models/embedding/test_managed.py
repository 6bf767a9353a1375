"""Managed rows: bounded, without collisions, deterministic, and fair by each policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.embedding.managed import ManagedRows, Policy, initialise
from models.embedding.vocabulary import OOV_ROW


def _read(managed: ManagedRows, *ids: int, step: int) -> list[int]:
    found: list[int] = managed.read(np.array(ids, np.int64), step).tolist()
    return found


def test_ids_have_no_row_until_renewal_and_distinct_ones_after() -> None:
    managed = ManagedRows(5)
    assert _read(managed, 7, -3, 7, step=0) == [OOV_ROW] * 3
    assert managed.renew(0).tolist() == [1, 2]
    assert _read(managed, 7, -3, 99, step=1) == [2, 1, OOV_ROW]
    assert managed.num_oov == 4
    assert len(managed) == 2


@given(
    st.lists(st.lists(st.integers(-20, 20), max_size=15), max_size=8),
    st.integers(2, 9),
    st.sampled_from(["lfu", "lru", "distance_lfu"]),
    st.integers(1, 20),
)
def test_rows_never_collide_and_survivors_stay(
    reads: list[list[int]], num_rows: int, policy: Policy, pending_max: int
) -> None:
    managed, twin = ManagedRows(num_rows, policy), ManagedRows(num_rows, policy, pending_max=pending_max)
    everything = np.arange(-20, 21)
    for step, ids in enumerate(reads):
        before = managed.rows(everything)
        _read(managed, *ids, step=step)
        _read(twin, *ids, step=step)
        changed = managed.renew(step)
        # Coalescing early is invisible, and the same reads give the same map.
        assert twin.renew(step).tolist() == changed.tolist()
        after = managed.rows(everything)
        np.testing.assert_array_equal(after, twin.rows(everything))
        held = after[after != OOV_ROW]
        assert len(held) == len(set(held.tolist())) == len(managed) <= num_rows - 1
        survivors = (before != OOV_ROW) & (after != OOV_ROW)
        np.testing.assert_array_equal(before[survivors], after[survivors])
        newcomers = (before == OOV_ROW) & (after != OOV_ROW)
        assert sorted(after[newcomers].tolist()) == changed.tolist()


@pytest.mark.parametrize(("policy", "kept"), [("lfu", {1, 2}), ("lru", {2, 3}), ("distance_lfu", {2, 3})])
def test_policies_keep_whom_they_should(policy: Any, kept: set[int]) -> None:
    managed = ManagedRows(3, policy)
    _read(managed, *[1] * 9, step=0)  # often, long ago
    _read(managed, *[2] * 5, step=90)  # often enough, lately
    _read(managed, 3, step=99)  # once, just now
    managed.renew(100)
    ids = np.array([1, 2, 3])
    assert {int(key) for key in ids[managed.rows(ids) != OOV_ROW]} == kept


def test_an_evicted_id_gives_its_row_to_a_new_one() -> None:
    managed = ManagedRows(2, "lru")
    _read(managed, 5, step=0)
    assert managed.renew(0).tolist() == [1]
    assert managed.renew(1).tolist() == []
    _read(managed, 6, step=2)
    assert managed.renew(2).tolist() == [1]
    assert _read(managed, 5, 6, step=3) == [OOV_ROW, 1]


def test_a_tie_goes_to_the_id_that_has_the_row() -> None:
    managed = ManagedRows(2, "lfu")
    _read(managed, 5, step=0)
    managed.renew(0)
    _read(managed, 4, step=1)
    assert managed.renew(1).tolist() == []
    assert managed.rows(np.array([4, 5])).tolist() == [OOV_ROW, 1]


def test_the_vocabulary_serves_what_the_map_holds() -> None:
    managed = ManagedRows(4)
    _read(managed, 8, 3, 8, step=0)
    managed.renew(0)
    keys = np.array([3, 8, 9])
    np.testing.assert_array_equal(managed.vocabulary().rows(keys), managed.rows(keys))


def test_fresh_rows_depend_on_seed_and_row_alone() -> None:
    one, two = np.zeros((6, 3), np.float32), np.zeros((6, 3), np.float32)
    initialise(one, np.array([2, 4]), 0.05, seed=1)
    initialise(two, np.array([4]), 0.05, seed=1)
    np.testing.assert_array_equal(one[4], two[4])
    assert not (one[[2, 4]] == 0).any()
    assert not one[[0, 1, 3, 5]].any()
    assert np.abs(one).max() <= 0.05
    before = one[4].copy()
    initialise(one, np.array([4]), 0.05, seed=2)
    assert (one[4] != before).all()


def test_what_does_not_fit_is_refused() -> None:
    for arguments in ({"num_rows": 1}, {"num_rows": 2, "pending_max": 0}, {"num_rows": 2, "decay": -0.1}):
        with pytest.raises(ValueError, match="num_rows must be at least 2"):
            ManagedRows(**arguments)
    for row in (3, -1):
        with pytest.raises(IndexError, match=r"row must be in \[0, 3\)"):
            initialise(np.zeros((3, 2), np.float32), np.array([row]), 0.05, 0)
