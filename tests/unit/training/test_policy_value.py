"""Estimates from partial logs agree with what is known of all tiers."""

from __future__ import annotations

import numpy as np
import pytest

from training.policy_value import (
    Estimate,
    Floats,
    PolicyLog,
    doubly_robust,
    draw_log,
    effective_sample_size,
    importance_weights,
    inverse_propensity,
    replay,
    served_as,
)

N = 40_000
RANDOM = np.random.default_rng(0)
DIFFICULTY = RANDOM.normal(size=N)
LOSSES = np.stack([1 + DIFFICULTY, 0.9 + 0.8 * DIFFICULTY, 0.7 + 0.7 * DIFFICULTY], 1) + 0.3 * RANDOM.normal(
    size=(N, 3)
)
CHOSEN = np.where(DIFFICULTY > 0.5, 2, np.where(DIFFICULTY > 0, 1, 0))
TRUTH = LOSSES[np.arange(N), CHOSEN].mean()
MODEL = np.stack([1 + DIFFICULTY, 0.9 + 0.8 * DIFFICULTY, 0.7 + 0.7 * DIFFICULTY], 1)


def robust_of_chosen(log: PolicyLog, model: Floats) -> Estimate:
    rows = np.arange(N)
    chance = served_as(log, CHOSEN)
    return doubly_robust(log, chance, expected=model[rows, CHOSEN], predicted=model[rows, log.served])


@pytest.mark.parametrize("propensities", [[1 / 3, 1 / 3, 1 / 3], [0.2, 0.2, 0.6]])
def test_every_estimate_is_near_the_truth_on_an_even_log_and_two_on_any(propensities: list[float]) -> None:
    log = draw_log(LOSSES, np.array(propensities), seed=1)
    weighted, robust = inverse_propensity(log, served_as(log, CHOSEN)), robust_of_chosen(log, MODEL)
    for estimate in (weighted, robust):
        assert estimate.value == pytest.approx(TRUTH, abs=4 * estimate.error)
    assert robust.error < 0.6 * weighted.error, "a model that knows something takes spread away"
    found = replay(log, CHOSEN)
    if len(set(propensities)) == 1:
        assert found.value == pytest.approx(TRUTH, abs=4 * found.error)
    else:
        assert abs(found.value - TRUTH) > 4 * found.error, "replay needs an even log"


def test_a_wrong_model_leaves_the_doubly_robust_estimate_right() -> None:
    log = draw_log(LOSSES, np.array([0.2, 0.3, 0.5]), seed=2)
    estimate = robust_of_chosen(log, np.full((N, 3), 5.0))
    assert estimate.value == pytest.approx(TRUTH, abs=4 * estimate.error)


def test_wrong_propensities_leave_it_right_with_a_right_model() -> None:
    log = draw_log(LOSSES, np.array([0.2, 0.3, 0.5]), seed=3)
    wrong = PolicyLog(log.served, np.full(N, 0.9), log.losses)
    assert robust_of_chosen(wrong, MODEL).value == pytest.approx(TRUTH, abs=0.01)
    assert abs(inverse_propensity(wrong, served_as(wrong, CHOSEN)).value - TRUTH) > 0.1


def test_a_policy_that_draws_is_estimated_from_a_log_of_another() -> None:
    propensities = np.where(DIFFICULTY[:, None] > 0, [[0.1, 0.3, 0.6]], [[0.5, 0.3, 0.2]])
    policy = np.where(DIFFICULTY[:, None] > 0.5, [[0.8, 0.2, 0.0]], [[0.1, 0.2, 0.7]])
    log = draw_log(LOSSES, propensities, seed=5)
    rows = np.arange(N)
    chance = policy[rows, log.served]
    truth = float((policy * LOSSES).sum(axis=1).mean())
    assert abs(float(log.losses.mean()) - truth) > 0.05, "the two policies differ"
    weighted = inverse_propensity(log, chance)
    robust = doubly_robust(log, chance, expected=(policy * MODEL).sum(axis=1), predicted=MODEL[rows, log.served])
    for estimate in (weighted, robust):
        assert estimate.value == pytest.approx(truth, abs=4 * estimate.error)
    assert robust.error < weighted.error
    assert importance_weights(log, chance).mean() == pytest.approx(1.0, abs=0.03)


def test_the_logs_own_policy_has_the_logs_own_mean() -> None:
    log = draw_log(LOSSES, np.array([0.2, 0.3, 0.5]), seed=6)
    assert inverse_propensity(log, log.propensity).value == pytest.approx(log.losses.mean())
    assert effective_sample_size(importance_weights(log, log.propensity)) == pytest.approx(N)


def test_one_heavy_weight_leaves_an_effective_sample_of_about_one() -> None:
    assert effective_sample_size(np.array([1000.0, 1.0, 1.0, 1.0])) == pytest.approx(1.006, abs=0.001)
    assert effective_sample_size(np.array([2.0, 2.0, 0.0])) == pytest.approx(2.0)
    assert effective_sample_size(np.zeros(3)) == 0.0


def test_draws_follow_their_propensities() -> None:
    log = draw_log(LOSSES, np.array([0.1, 0.3, 0.6]), seed=4)
    np.testing.assert_allclose(np.bincount(log.served) / N, [0.1, 0.3, 0.6], atol=0.01)
    assert set(np.unique(log.propensity)) == {0.1, 0.3, 0.6}


def test_a_log_that_cannot_be_is_refused() -> None:
    ones = np.ones(2)
    with pytest.raises(ValueError, match="one length"):
        PolicyLog(np.zeros(2, np.int64), ones, np.ones(3))
    with pytest.raises(ValueError, match="above 0"):
        PolicyLog(np.zeros(2, np.int64), np.array([0.5, 0.0]), ones)
    with pytest.raises(ValueError, match="none of 2"):
        replay(PolicyLog(np.zeros(2, np.int64), ones, ones), np.ones(2, np.int64))
    log = PolicyLog(np.zeros(2, np.int64), ones, ones)
    with pytest.raises(ValueError, match="length 2, has 3"):
        inverse_propensity(log, np.ones(3))
    with pytest.raises(ValueError, match="from 0 to 1"):
        inverse_propensity(log, np.array([0.5, 1.5]))
