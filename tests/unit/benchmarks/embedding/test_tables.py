"""The table comparison on made-up ratings: schemes are laid out right, and every cell gives its figures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.embedding.movielens_ids import FEATURES, IdSamples
from benchmarks.embedding.schemes import WIDTH, sizes
from benchmarks.embedding.tables import Cell, TablesConfig, cells, measure_cells


@pytest.fixture(scope="module")
def samples() -> IdSamples:
    rng = np.random.default_rng(0)
    num_ids = (60, 40, 2, 7, 21, 30)
    ids = np.stack([rng.permutation(np.arange(1_500) % size) for size in num_ids], axis=1)
    taste = rng.standard_normal(num_ids[1])
    labels = (taste[ids[:, 1]] + rng.standard_normal(1_500) > 0).astype(np.float32)
    train, valid, test = np.split(np.arange(1_500), [1_200, 1_350])
    return IdSamples(ids, labels, num_ids, train, valid, test, "made up")


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1])
def test_schemes_of_a_budget_have_equal_bytes_and_widths(samples: IdSamples, budget: float) -> None:
    full = sum(samples.num_ids) * WIDTH * 4
    for cell in cells(TablesConfig(budgets=(budget,))):
        scheme = cell.scheme(samples)
        assert scheme.rows.shape[1] * scheme.width == len(FEATURES) * WIDTH
        assert 0 <= scheme.rows.min() <= scheme.rows.max() < scheme.num_rows
        share = 1.0 if cell.name == "collisionless" else budget
        assert share * full * 0.85 <= scheme.table_bytes <= share * full


def test_the_collisionless_scheme_has_no_collisions(samples: IdSamples) -> None:
    rows = Cell("collisionless", 1.0).scheme(samples).rows
    assert len(np.unique(rows)) == sum(samples.num_ids)
    assert len(set.intersection(*(set(column) for column in rows.T.tolist()))) == 0


def test_separate_tables_do_not_share_rows(samples: IdSamples) -> None:
    rows = Cell("separate", 0.5).scheme(samples).rows
    bounds = np.cumsum([0, *sizes(samples, 0.5, None).values()])
    for index in range(len(FEATURES)):
        assert bounds[index] <= rows[:, index].min() <= rows[:, index].max() < bounds[index + 1]


@pytest.mark.usefixtures("_one_thread")
def test_every_cell_and_row_type_gives_its_figures(samples: IdSamples) -> None:
    config = TablesConfig(budgets=(0.5,), chunks=(3,), num_epochs=1)
    found = measure_cells(samples, config, seed=1)
    auc = {(one.params["scheme"]): one.value for one in found if one.metric == "auc"}
    assert set(auc) == {"collisionless", "separate", "allocated", "multiplexed"}
    assert all(0.3 < value <= 1.0 for value in auc.values())
    assert {one.metric for one in found} >= {"gain_allocated", "gain_multiplexed"}
    ne = {one.params["row_type"]: one.value for one in found if one.metric == "rows_ne"}
    assert ne["fp32"] == pytest.approx(ne["int8"], abs=0.01)
    error = {one.params["row_type"]: one.value for one in found if one.metric == "rows_error"}
    assert error["fp32"] == 0 < error["fp16"] < error["int8"] < error["int4"] < 0.3
