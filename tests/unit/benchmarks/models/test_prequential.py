"""Rows are predicted with outcomes that are older than the delay, and with no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.models.prequential import DAY_S, Stream, _newest, recalibrated, rerouted
from models.calibration import Calibration
from models.routing import SIGNALS, surface_keys
from tests.unit.training.test_recalibration import COSTS, DEPTHS, gain_model
from training.data import Rows
from training.outcomes import JoinConfig
from training.recalibration import RecalibrationConfig

JOIN = JoinConfig(delay_s=DAY_S, age_s_max=30 * DAY_S)
CONFIG = RecalibrationConfig(outcomes_min=50, users_min=5, prior_rows=100)
IDENTITY = Calibration.identity(DEPTHS)


def stream(num: int = 4_000, num_days: int = 20, seed: int = 0) -> Stream:
    """Return rows of which a third is clicked while the network says a half."""
    random = np.random.default_rng(seed)
    clicks = random.random(num) < 0.35
    nothing = np.zeros(num, np.uint8)
    rows = Rows(
        user_index=random.integers(0, 50, num).astype(np.int32),
        item_id=np.ones(num, np.int64),
        timestamp_s=np.sort(random.integers(0, num_days * DAY_S, num)),
        surface=nothing,
        slot=nothing,
        click=clicks,
        conversion=np.zeros(num, np.bool_),
        event_position=np.zeros(num, np.int64),
    )
    logits = np.repeat(random.normal(size=(num, 1, 1)) * 0.1, 3, axis=1) * np.ones((1, 1, 2))
    signals = random.normal(size=(num, len(SIGNALS))).astype(np.float32)
    return Stream(rows, DEPTHS, logits, signals, np.repeat(surface_keys(("feed",)), num))


def test_labels_of_a_day_change_no_prediction_before_its_end_and_the_delay() -> None:
    before = stream()
    day = before.rows.timestamp_s // DAY_S
    other = replace(before.rows, click=np.where(day >= 10, ~before.rows.click, before.rows.click))
    after = replace(before, rows=other)
    first, second = (recalibrated(each, IDENTITY, 1.0, 0, JOIN, CONFIG) for each in (before, after))
    start = int(before.rows.timestamp_s[0])
    own_day = (before.rows.timestamp_s - start) // DAY_S
    np.testing.assert_array_equal(first[own_day <= 10], second[own_day <= 10])
    assert np.abs(first[own_day >= 13] - second[own_day >= 13]).min() > 0.01


def test_predictions_come_to_the_rate_that_outcomes_have() -> None:
    rows = stream()
    found = recalibrated(rows, IDENTITY, 1.0, 0, JOIN, CONFIG)
    chance = 1 / (1 + np.exp(-found[:, 2]))
    assert chance[:100].mean() == pytest.approx(0.5, abs=0.02), "nothing is known yet"
    assert chance[-500:].mean() == pytest.approx(0.35, abs=0.03)
    few = recalibrated(rows, IDENTITY, 0.0, 0, JOIN, CONFIG)
    np.testing.assert_allclose(few, rows.logits[:, :, 0], atol=1e-6)


def test_a_user_counts_with_the_newest_outcomes_alone() -> None:
    kept = _newest(np.array([7, 3, 7, 7, 3, 9]), 2)
    assert kept.tolist() == [False, True, True, True, True, True]
    known = stream().outcomes(20 * DAY_S, np.ones(4_000, np.bool_), JOIN.model_copy(update={"user_outcomes_max": 3}))
    assert len(known) == 50 * 3
    assert known.age_s.min() >= JOIN.delay_s


def test_a_router_without_outcomes_is_the_published_one() -> None:
    rows = stream(400)
    none = RecalibrationConfig(outcomes_min=10_000)
    chosen = rerouted(rows, IDENTITY, gain_model(), COSTS, np.array([0.05, 1.0]), JOIN, none)
    assert chosen.shape == (2, 400)
    assert (chosen[0] == 0).all()
    assert COSTS[chosen[1]].mean() > 0.4
    followed = rerouted(rows, IDENTITY, gain_model(), COSTS, np.array([0.05, 1.0]), JOIN, CONFIG)
    np.testing.assert_array_equal(followed[:, :100], chosen[:, :100])
