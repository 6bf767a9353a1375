"""Logistic regression with a prior: the optimum, the prior's weight, and rows that count more."""

from __future__ import annotations

import numpy as np
import pytest

from models.logistic import fit_logistic

ONE = np.ones(1)


def test_the_gradient_is_zero_at_what_is_found() -> None:
    random = np.random.default_rng(0)
    design, offset = random.normal(size=(500, 3)), random.normal(size=500)
    labels = random.random(500) < 0.3
    prior, precision, weights = np.array([1.0, 0.0, -1.0]), np.array([5.0, 1.0, 20.0]), random.random(500)
    found = fit_logistic(design, offset, labels, prior, precision, weights)
    chance = 1 / (1 + np.exp(-(offset + design @ found)))
    gradient = design.T @ (weights * (chance - labels)) + precision * (found - prior)
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


def test_without_rows_the_prior_is_found() -> None:
    prior = np.array([0.5, 2.0])
    found = fit_logistic(np.zeros((0, 2)), np.zeros(0), np.zeros(0, np.bool_), prior, np.ones(2))
    np.testing.assert_array_equal(found, prior)


def test_labels_of_one_kind_move_the_offset_no_further_than_the_prior_allows() -> None:
    found = fit_logistic(np.ones((1_000, 1)), np.zeros(1_000), np.ones(1_000, np.bool_), np.zeros(1), 100 * ONE)
    assert 1.0 < found[0] < 3.0
    assert 100 * found[0] == pytest.approx(1_000 / (1 + np.exp(found[0])), rel=1e-6)


def test_a_weight_is_a_number_of_rows() -> None:
    design, labels = np.array([[1.0], [2.0], [-1.0]]), np.array([True, False, True])
    thrice = [0, 1, 1, 1, 2]
    weighted = fit_logistic(design, np.zeros(3), labels, np.zeros(1), ONE, np.array([1.0, 3.0, 1.0]))
    repeated = fit_logistic(design[thrice], np.zeros(5), labels[thrice], np.zeros(1), ONE)
    np.testing.assert_allclose(weighted, repeated, atol=1e-8)


def test_logits_that_overflow_are_borne() -> None:
    design = np.array([[1e3], [-1e3]])
    found = fit_logistic(design, np.array([1e4, -1e4]), np.array([False, True]), np.zeros(1), ONE)
    assert np.isfinite(found).all()
