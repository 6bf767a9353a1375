"""Workers with sharded and replicated parameters take the step that one worker takes, with fewer collectives."""

from __future__ import annotations

import math

import pytest

from models.config import RankerConfig
from models.random_weights import TINY
from training.parallel.delegation import module_of
from training.parallel.measure import CANDIDATES_EACH, NUM_REQUESTS, measure_delegation

_NUM_ROWS = {table.name: 7 for table in TINY.tables} | {"item": 301, "user": 200}
_EPSILON = 2.0**-23


@pytest.mark.slow  # two processes that import torch
def test_two_workers_take_the_step_of_one() -> None:
    all_sharded, delegated, all_replicated = measure_delegation(TINY, _NUM_ROWS, (0, 1000, 2**40))
    # A gradient is a mean over all rows, summed in two parts: 16 * eps * sqrt(rows).
    limit = 16 * _EPSILON * math.sqrt(NUM_REQUESTS * CANDIDATES_EACH * TINY.encoder.num_events)
    for found in (all_sharded, delegated, all_replicated):
        assert found.error <= limit
    total = all_sharded.num_sharded
    assert (all_sharded.num_replicated, all_replicated.num_sharded) == (0, 0)
    assert delegated.num_replicated + delegated.num_sharded == total
    assert delegated.num_sharded == 8 * (301 + 200)
    # Two tables each gathered and scattered, and one bucket.
    assert delegated.num_collectives == 5
    assert all_replicated.num_collectives == 1
    assert all_sharded.num_collectives > 30
    assert all_replicated.num_bytes == 4 * total
    assert delegated.num_bytes == pytest.approx(4 * (2 * delegated.num_sharded + delegated.num_replicated), rel=0.01)
    assert delegated.num_bytes < all_sharded.num_bytes


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tables.weights.item", "tables.weights.item"),
        ("network.layers.1.candidate.up.weight", "network.layers.1"),
        ("network.encoder.layers.0.down.weight", "network.encoder.layers.0"),
        ("network.heads.exits.2.logits.weight", "network.heads.exits.2"),
        ("network.presence", "network.presence"),
        ("network.dense.0.weight", "network.dense"),
    ],
)
def test_buffers_are_those_of_modules(name: str, module: str) -> None:
    assert module_of(name) == module


def test_workers_must_share_the_requests_evenly() -> None:
    with pytest.raises(ValueError, match="num_workers must divide 32, is 3"):
        measure_delegation(RankerConfig(), _NUM_ROWS, (0,), num_workers=3)
