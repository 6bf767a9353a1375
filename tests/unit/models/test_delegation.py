"""The partition is complete and by size, at its edges too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.delegation import delegate, delegate_weights
from tests.helpers.weights import random_weights


@given(st.dictionaries(st.text(max_size=4), st.integers(1, 1000)), st.integers(0, 1001))
def test_every_parameter_is_on_one_side(sizes: dict[str, int], threshold: int) -> None:
    found = delegate(sizes, threshold)
    assert sorted(found.replicated + found.sharded) == sorted(sizes)
    assert all(sizes[name] < threshold for name in found.replicated)
    assert all(sizes[name] >= threshold for name in found.sharded)
    assert found.num_replicated + found.num_sharded == sum(sizes.values())


@pytest.mark.parametrize(("threshold", "replicated"), [(9, ()), (10, ()), (11, ("a",))])
def test_the_threshold_itself_is_sharded(threshold: int, replicated: tuple[str, ...]) -> None:
    assert delegate({"a": 10}, threshold).replicated == replicated


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold must be at least 0, is -1"):
        delegate({}, -1)


def test_weights_are_partitioned_with_their_tables() -> None:
    found = delegate_weights(random_weights(num_items=100, golden=False), threshold=800)
    assert found.sharded == ("tables/item",)
    assert "network.presence" in found.replicated
    assert "tables/genre" in found.replicated
