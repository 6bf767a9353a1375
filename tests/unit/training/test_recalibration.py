"""What outcomes make of calibration and worth: they follow, not too far, and come back as an ordinary delta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.calibration import Calibration
from models.features import FeatureExtractor
from models.golden import Golden
from models.heads import CLICK, CONVERSION
from models.random_weights import TINY
from models.routing import GROUP, SIGNALS, GainModel, surface_keys
from models.source import MemorySource
from models.stations import CandidateRanker, RequestEncoder
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.state import TensorState
from tests.helpers.updated_mesh import publish_source
from tests.helpers.weights import random_weights
from training.deltas import publish_inverse
from training.outcomes import Outcomes
from training.recalibration import (
    RecalibrationConfig,
    age_weights,
    is_news,
    publish_refit,
    published_parts,
    refit,
    refit_line,
    refit_worth,
    resampled,
)
from training.routing import Slice

DEPTHS = (0, 1, 2)
COSTS = np.array([0.05, 0.5, 1.0])
CONFIG = RecalibrationConfig()
IDENTITY = Calibration.identity(DEPTHS)


def gain_model() -> GainModel:
    """Return a model in which depth 1 is worth 0.02 and depth 2 twice that where signal 0 is positive."""
    hidden = np.zeros((len(SIGNALS), 1))
    hidden[0] = 1.0
    return GainModel(
        depths=DEPTHS,
        mean=np.zeros(len(SIGNALS)),
        deviation=np.ones(len(SIGNALS)),
        hidden=hidden,
        bias=np.zeros(1),
        out=np.array([[0.0, 0.02, 0.04]]),
        worth=np.ones(3),
        unknown=np.array([0.0, 0.01, 0.02]),
        surface_keys=surface_keys(("feed",)),
        surface=np.zeros((1, 3)),
        prices=np.array([[0.05, 1.0], [0.5, 0.1], [1.0, 0.0]]),
    )


def outcomes(num: int, offset: float = 0.0, seed: int = 0, age_s: float = 0.0) -> Outcomes:
    """Return outcomes whose clicks come with the logit of every depth and an offset."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=num)
    logits = np.repeat(truth[:, None, None], 3, axis=1) * np.ones((1, 1, 2))
    clicks = random.random(num) < 1 / (1 + np.exp(-(truth + offset)))
    return Outcomes(
        depths=DEPTHS,
        logits=logits,
        clicks=clicks,
        conversions=clicks & (random.random(num) < 0.5),
        age_s=np.full(num, age_s),
        signals=random.normal(size=(num, len(SIGNALS))).astype(np.float32),
        surfaces=np.repeat(surface_keys(("feed",)), num),
        counts={"users": 100},
    )


def _parameters(calibration: Calibration, depth: int = 2) -> list[float]:
    found: list[float] = calibration.tensors()[f"calibration.{depth}"][:, CLICK].tolist()
    return found


def test_a_base_rate_that_moved_is_followed_by_every_depth() -> None:
    found = refit(IDENTITY, None, COSTS, outcomes(30_000, offset=-0.4), CONFIG)
    assert found is not None
    for depth in DEPTHS:
        scale, offset = _parameters(found.calibration, depth)
        assert scale == pytest.approx(1.0, abs=0.05)
        assert offset == pytest.approx(-0.4, abs=0.05)
        before, after = found.ratios[depth]
        assert before > 1.1
        assert after == pytest.approx(1.0, abs=0.01)


def test_few_outcomes_move_little_and_fewer_nothing() -> None:
    moved = [
        abs(_parameters(found.calibration)[1])
        for num in (500, 5_000, 30_000)
        if (found := refit(IDENTITY, None, COSTS, outcomes(num, -0.4), CONFIG)) is not None
    ]
    assert moved[0] < moved[1] < moved[2]
    assert moved[0] < 0.25
    assert refit(IDENTITY, None, COSTS, outcomes(CONFIG.outcomes_min - 1), CONFIG) is None
    few = replace(outcomes(5_000), counts={"users": CONFIG.users_min - 1})
    assert refit(IDENTITY, None, COSTS, few, CONFIG) is None


def test_old_outcomes_count_less() -> None:
    ages = np.array([-5.0, 0.0, CONFIG.half_life_s, 2 * CONFIG.half_life_s])
    np.testing.assert_allclose(age_weights(ages, CONFIG), [1, 1, 0.5, 0.25])
    new, old = (refit(IDENTITY, None, COSTS, outcomes(5_000, -0.4, age_s=age_s), CONFIG) for age_s in (0.0, 90e6))
    assert new is not None
    assert old is not None
    assert _parameters(new.calibration)[1] < -0.2
    assert abs(_parameters(old.calibration)[1]) < 0.01


@pytest.mark.parametrize("label", [True, False])
def test_outcomes_that_are_all_alike_move_it_no_further_than_the_limit(label: bool) -> None:
    some = outcomes(30_000)
    all_alike = replace(some, clicks=np.full(30_000, label), conversions=np.zeros(30_000, np.bool_))
    found = refit(IDENTITY, None, COSTS, all_alike, CONFIG)
    assert found is not None
    scale, offset = _parameters(found.calibration)
    assert abs(offset) <= CONFIG.offset_max
    assert 1 / CONFIG.scale_max <= scale <= CONFIG.scale_max
    assert (offset > 0) == label
    assert (2 in found.ratios) == label, "without a click there is no rate to compare with"


def test_the_same_outcomes_give_the_same_bits_however_often() -> None:
    some = outcomes(2_000, 0.2)
    first, second = (refit(IDENTITY, gain_model(), COSTS, some, CONFIG) for _ in range(2))
    assert first is not None
    assert second is not None
    for name, value in first.calibration.tensors().items():
        np.testing.assert_array_equal(value, second.calibration.tensors()[name])
    assert first.gain is not None
    assert second.gain is not None
    np.testing.assert_array_equal(first.gain.prices, second.gain.prices)


def test_the_new_line_is_taken_after_the_published_one() -> None:
    published = Calibration({depth: np.array([[2.0, 1.0], [0.5, 0.0]], np.float32) for depth in DEPTHS})
    some = outcomes(20_000, 0.3)
    halved = replace(some, logits=(some.logits - np.array([0.5, 0.0])) / np.array([2.0, 1.0]))
    found = refit(published, None, COSTS, halved, CONFIG)
    plain = refit(IDENTITY, None, COSTS, some, CONFIG)
    assert found is not None
    assert plain is not None
    raw = halved.logits[:5, 2].astype(np.float32)
    expected = plain.calibration.apply(some.logits[:5, 2].astype(np.float32), 2)
    np.testing.assert_allclose(found.calibration.apply(raw, 2)[:, CLICK], expected[:, CLICK], atol=1e-5)


def test_conversions_are_of_clicks() -> None:
    some = outcomes(20_000)
    found = refit(IDENTITY, None, COSTS, some, CONFIG)
    assert found is not None
    clicked = some.clicks
    factor, offset = refit_line(
        some.logits[clicked, 2, CONVERSION], some.conversions[clicked], np.ones(int(clicked.sum())), CONFIG
    )
    np.testing.assert_allclose(found.calibration.tensors()["calibration.2"][:, CONVERSION], [factor, offset], rtol=1e-5)


def _rows_with_gains(num: int, share: float, seed: int = 0) -> Slice:
    """Return rows in which depth knows ``share`` of what the gain model says that it knows."""
    random = np.random.default_rng(seed)
    signals = random.normal(size=(num, len(SIGNALS))).astype(np.float32)
    wanted = np.maximum(signals[:, 0], 0) * 0.04 * share
    # Of a correction d of a logit at 0 that is right, about d * d / 8 nats are saved.
    correction = np.sqrt(8 * wanted) * random.choice([-1, 1], num)
    clicks = random.random(num) < 1 / (1 + np.exp(-correction))
    first = np.zeros(num)
    logits = np.stack([first, first, correction], axis=1)
    return Slice(signals, np.repeat(surface_keys(("feed",)), num), DEPTHS, logits, clicks)


def test_worth_follows_what_depth_has_turned_out_to_save() -> None:
    num = 60_000
    for share in (0.25, 1.0):
        found = refit_worth(gain_model(), _rows_with_gains(num, share), COSTS, np.ones(num), CONFIG)
        assert found.worth[2] == pytest.approx(share, abs=0.15)
        assert found.worth[1] < 0.2, "depth 1 says what the first pass says"
        assert found.prices.shape == gain_model().prices.shape
        np.testing.assert_allclose(found.unknown, gain_model().unknown * found.worth)
    few = refit_worth(gain_model(), _rows_with_gains(20, 0.25), COSTS, np.ones(20), CONFIG)
    assert few.worth[2] > 0.6, "twenty labels say little of it"


def test_a_table_of_prices_keeps_its_ends_and_its_order() -> None:
    table = np.array([[0.05, 3.0], [0.2, 1.0], [0.9, 0.5], [1.0, 0.0]])
    for num in (2, 3, 9):
        found = resampled(table, num)
        assert found.shape == (num, 2)
        np.testing.assert_array_equal(found[[0, -1]], table[[0, -1]])
        assert (np.diff(found[:, 0]) > 0).all()
        assert (np.diff(found[:, 1]) < 0).all()


def _store(folder: Path) -> tuple[WeightStore, MemorySource]:
    store, source = WeightStore(folder), random_weights(TINY, version="v")
    source.groups[GROUP] = gain_model().tensors()
    publish_source(store, source)
    return store, source


def test_a_refit_is_an_ordinary_delta_with_its_golden_answers(tmp_path: Path) -> None:
    store, source = _store(tmp_path)
    _, calibration, gain, costs = published_parts(store, "v")
    some = outcomes(5_000, -0.4)
    found = refit(calibration, gain, costs, some, CONFIG)
    assert found is not None
    assert is_news(store, "v", found, some, CONFIG)
    delta = publish_refit(store, "v", found)
    assert not is_news(store, "v", found, some, CONFIG), "what is published is no news"
    assert delta.stamp == "v+1"
    assert {f"dense/calibration.{depth}" for depth in DEPTHS} <= set(delta.whole)
    assert f"{GROUP}/worth" in delta.whole
    assert not delta.rows
    assert all(key.startswith(("dense/calibration.", "golden/", f"{GROUP}/")) for key in delta.whole)
    state = TensorState.of(store.open("v"), DeltaLog(store, "v").since(0))
    after = MemorySource("v+1", state.groups(), dict(state.documents))
    golden = Golden.from_weights(after)
    golden.check_ranker(CandidateRanker.from_weights(after), FeatureExtractor.from_weights(after))
    golden.check_encoder(RequestEncoder.from_weights(after))
    read = Calibration.from_weights(after, DEPTHS).tensors()
    np.testing.assert_array_equal(read["calibration.2"], found.calibration.tensors()["calibration.2"])
    again = refit(calibration, gain, costs, some, CONFIG)
    assert again is not None
    repeated = publish_refit(store, "v", again)
    assert not repeated.whole, "the same outcomes change nothing"
    back = publish_inverse(store, "v", 0)
    np.testing.assert_array_equal(back.whole["dense/calibration.2"], source.groups["dense"]["calibration.2"])
