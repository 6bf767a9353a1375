"""Estimates from partial logs agree with what is known of all tiers."""

from __future__ import annotations

import numpy as np
import pytest

from training.policy_value import PolicyLog, doubly_robust, draw_log, inverse_propensity, replay

N = 40_000
RANDOM = np.random.default_rng(0)
DIFFICULTY = RANDOM.normal(size=N)
LOSSES = np.stack([1 + DIFFICULTY, 0.9 + 0.8 * DIFFICULTY, 0.7 + 0.7 * DIFFICULTY], 1) + 0.3 * RANDOM.normal(
    size=(N, 3)
)
CHOSEN = np.where(DIFFICULTY > 0.5, 2, np.where(DIFFICULTY > 0, 1, 0))
TRUTH = LOSSES[np.arange(N), CHOSEN].mean()


@pytest.mark.parametrize("propensities", [[1 / 3, 1 / 3, 1 / 3], [0.2, 0.2, 0.6]])
def test_every_estimate_is_near_the_truth_on_an_even_log_and_two_on_any(propensities: list[float]) -> None:
    log = draw_log(LOSSES, np.array(propensities), seed=1)
    predicted = np.stack([1 + DIFFICULTY, 0.9 + 0.8 * DIFFICULTY, 0.7 + 0.7 * DIFFICULTY], 1)
    weighted, robust = inverse_propensity(log, CHOSEN), doubly_robust(log, CHOSEN, predicted)
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
    estimate = doubly_robust(log, CHOSEN, np.full((N, 3), 5.0))
    assert estimate.value == pytest.approx(TRUTH, abs=4 * estimate.error)


def test_wrong_propensities_leave_it_right_with_a_right_model() -> None:
    log = draw_log(LOSSES, np.array([0.2, 0.3, 0.5]), seed=3)
    wrong = PolicyLog(log.served, np.full(N, 0.9), log.losses)
    predicted = np.stack([1 + DIFFICULTY, 0.9 + 0.8 * DIFFICULTY, 0.7 + 0.7 * DIFFICULTY], 1)
    assert doubly_robust(wrong, CHOSEN, predicted).value == pytest.approx(TRUTH, abs=0.01)
    assert abs(inverse_propensity(wrong, CHOSEN).value - TRUTH) > 0.1


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
