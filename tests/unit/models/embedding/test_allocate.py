"""Rows under a budget: never over it, never more than ids, and as good as trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.embedding.allocate import Demand, allocate, proportional
from shared.errors import ConfigError

COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(lambda counts: np.array(counts, np.int64))
FEATURES = st.lists(st.tuples(COUNTS, st.sampled_from([0.25, 1.0, 3.0])), min_size=1, max_size=3)


def _demands(features: list[tuple[np.ndarray, float]], row_bytes: list[int]) -> list[Demand]:
    return [
        Demand.of(f"f{index}", counts, size, weight)
        for index, ((counts, weight), size) in enumerate(zip(features, itertools.cycle(row_bytes), strict=False))
    ]


def _total(demands: list[Demand], rows: dict[str, int]) -> float:
    return sum(demand.cost(rows[demand.name]) for demand in demands)


def _best(demands: list[Demand], budget: int) -> float:
    every = itertools.product(*(range(1, demand.num_ids + 1) for demand in demands))
    fits = (rows for rows in every if sum(n * d.row_bytes for n, d in zip(rows, demands, strict=True)) <= budget)
    return min(sum(d.cost(n) for n, d in zip(rows, demands, strict=True)) for rows in fits)


@given(FEATURES, st.integers(0, 30))
@settings(deadline=None)
def test_equal_rows_are_spent_as_well_as_by_trying_everything(
    features: list[tuple[np.ndarray, float]], spare: int
) -> None:
    demands = _demands(features, [8])
    budget = 8 * (len(demands) + spare)
    rows = allocate(demands, budget)
    assert _total(demands, rows) == pytest.approx(_best(demands, budget), abs=1e-12)


@given(FEATURES, st.integers(0, 200), st.lists(st.integers(1, 40), min_size=3, max_size=3))
@settings(deadline=None)
def test_unequal_rows_are_within_one_row_of_the_best(
    features: list[tuple[np.ndarray, float]], spare: int, sizes: list[int]
) -> None:
    demands = _demands(features, sizes)
    budget = sum(demand.row_bytes for demand in demands) + spare
    rows = allocate(demands, budget)
    one_more = max(sizes) * max(demand.gain(rows[demand.name]) for demand in demands)
    assert _total(demands, rows) <= _best(demands, budget) + one_more + 1e-12


@given(FEATURES, st.integers(0, 400), st.lists(st.integers(1, 40), min_size=3, max_size=3))
@settings(deadline=None)
def test_never_over_the_budget_nor_beyond_the_ids(
    features: list[tuple[np.ndarray, float]], spare: int, sizes: list[int]
) -> None:
    demands = _demands(features, sizes)
    budget = sum(demand.row_bytes for demand in demands) + spare
    for rows in (allocate(demands, budget), proportional(demands, budget)):
        assert sum(rows[demand.name] * demand.row_bytes for demand in demands) <= budget
        assert all(1 <= rows[demand.name] <= demand.num_ids for demand in demands)


@given(COUNTS)
def test_the_cost_falls_and_is_convex(counts: np.ndarray) -> None:
    demand = Demand.of("f", counts, 4)
    costs = np.array([demand.cost(rows) for rows in range(1, 40)])
    assert (np.diff(costs) <= 1e-15).all()
    assert (np.diff(costs, n=2) >= -1e-15).all()


def test_the_cost_is_that_of_random_hashes() -> None:
    """Dilution replaces the foreign traffic in an id's row by its mean: close to what hashes give, and above it."""
    rng = np.random.default_rng(5)
    counts = rng.zipf(1.3, 300).clip(max=10_000)
    shares = counts / counts.sum()
    for num_rows in (30, 150, 300):
        rows = rng.integers(0, num_rows, (2_000, len(shares)))
        found = []
        for hashed in rows:
            traffic = np.bincount(hashed, shares, num_rows)[hashed]
            found.append(float((shares * (traffic - shares) / traffic).sum()))
        expected = Demand.of("f", counts, 4).cost(num_rows)
        assert np.mean(found) <= expected <= np.mean(found) + 0.12


def test_all_that_is_asked_is_given_where_the_budget_allows() -> None:
    demands = [Demand.of("a", np.full(1_000, 3), 64), Demand.of("b", np.arange(1, 50), 128)]
    assert allocate(demands, 10**9) == {"a": 1_000, "b": 49} == proportional(demands, 10**9)


def test_rows_go_where_traffic_is_spread_not_where_ids_are_many() -> None:
    tail = np.ones(10_000, np.int64)
    tail[:3] = 10_000_000  # nearly all traffic on three ids: the others are not worth much
    demands = [Demand.of("few", np.full(2_000, 50), 4), Demand.of("many", tail, 4)]
    rows = allocate(demands, 4 * 3_000)
    assert rows["few"] > 1_900 > proportional(demands, 4 * 3_000)["few"]
    assert sum(rows.values()) == 3_000


def test_a_weight_pulls_rows() -> None:
    counts = np.arange(1, 500)
    even = allocate([Demand.of("a", counts, 4), Demand.of("b", counts, 4)], 4 * 400)
    tilted = allocate([Demand.of("a", counts, 4, weight=4.0), Demand.of("b", counts, 4)], 4 * 400)
    assert abs(even["a"] - even["b"]) <= 1
    assert tilted["a"] > even["a"]


def test_large_tables_are_sized_without_going_row_by_row() -> None:
    counts = np.random.default_rng(0).zipf(1.2, 200_000).clip(max=10**6)
    demands = [Demand.of("a", counts, 64), Demand.of("b", counts[:50_000], 64), Demand.of("c", np.array([5]), 64)]
    rows = allocate(demands, 64 * 100_000)
    assert 99_990 <= sum(rows.values()) <= 100_000
    assert rows["c"] == 1


def test_a_budget_that_is_too_small_is_refused_at_its_limit() -> None:
    demands = [Demand.of("a", np.ones(3, np.int64), 64), Demand.of("b", np.ones(2, np.int64), 36)]
    for sizes in (allocate, proportional):
        assert sizes(demands, 100) == {"a": 1, "b": 1}
        with pytest.raises(ConfigError, match="at least 100, is 99"):
            sizes(demands, 99)
        with pytest.raises(ConfigError, match="distinct features"):
            sizes([demands[0], demands[0]], 1_000)


def test_a_feature_without_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="must have an id that was read"):
        Demand.of("a", np.zeros(4, np.int64), 4)
    with pytest.raises(ValueError, match="are 0 and 1"):
        Demand.of("a", np.ones(4, np.int64), 0)
