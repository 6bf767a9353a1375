"""AUC against the definition, logloss and friends against hand-made numbers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics import Metrics, auc, grouped_auc

_ROWS = st.lists(
    st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans(), st.integers(0, 3)), min_size=1, max_size=40
)


def _pairs(chance: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> float:
    """Share of (positive, negative) pairs in the right order, ties half: the definition."""
    positive, negative = chance[labels], chance[~labels]
    if not len(positive) or not len(negative):
        return math.nan
    above = (positive[:, None] > negative).mean()
    return float(above + (positive[:, None] == negative).mean() / 2)


@given(_ROWS)
def test_grouped_auc_is_the_row_weighted_mean_of_the_definition(rows: list[tuple[float, bool, int]]) -> None:
    chance, labels, groups = (np.array(column) for column in zip(*rows, strict=True))
    areas, weights = [], []
    for group in np.unique(groups):
        own = groups == group
        area = _pairs(chance[own], labels[own])
        if not math.isnan(area):
            areas.append(area)
            weights.append(own.sum())
    expected = float(np.average(areas, weights=weights)) if areas else 0.5
    assert grouped_auc(chance, labels, groups) == pytest.approx(expected)
    whole = _pairs(chance, labels)
    assert auc(chance, labels) == pytest.approx(0.5 if math.isnan(whole) else whole)


def test_metrics_of_a_known_table() -> None:
    chance = np.array([0.8, 0.4, 0.6, 0.2])
    labels = np.array([True, False, False, True])
    metrics = Metrics.of(chance, labels, np.array([1, 1, 2, 2]))
    logloss = -(math.log(0.8) + math.log(0.6) + math.log(0.4) + math.log(0.2)) / 4
    assert metrics.num_rows == 4
    assert metrics.base_rate == 0.5
    assert metrics.logloss == pytest.approx(logloss)
    assert metrics.ne == pytest.approx(logloss / math.log(2))
    assert metrics.calibration == pytest.approx(1.0)
    assert metrics.auc == pytest.approx(0.5)
    assert metrics.gauc == pytest.approx(0.5)


def test_the_base_rate_has_a_normalised_entropy_of_one() -> None:
    labels = np.array([True, False, False, False])
    metrics = Metrics.of(np.full(4, 0.25), labels, np.zeros(4, np.int64))
    assert metrics.ne == pytest.approx(1.0)
    assert metrics.calibration == pytest.approx(1.0)


@pytest.mark.parametrize("labels", [[], [True, True], [False]])
def test_rows_without_both_labels_give_neutral_numbers(labels: list[bool]) -> None:
    metrics = Metrics.of(np.full(len(labels), 0.5), np.array(labels, np.bool_), np.zeros(len(labels), np.int64))
    assert metrics.auc == metrics.gauc == 0.5
    assert metrics.ne == 0.0


def test_certain_and_wrong_is_finite() -> None:
    metrics = Metrics.of(np.array([0.0, 1.0]), np.array([True, False]), np.zeros(2, np.int64))
    assert math.isfinite(metrics.logloss)
    assert metrics.auc == 0.0
