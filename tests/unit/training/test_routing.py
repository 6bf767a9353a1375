"""The gain model finds the requests that depth helps, and what it says is published with the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from models.random_weights import TINY
from models.routing import GROUP, SIGNALS, GainModel, surface_keys
from shared.weights import WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import HistoryReader, request_batches
from training.loop import train
from training.model import TrainedModel
from training.publish import publish
from training.routing import (
    ROWS_MIN,
    Slice,
    believed,
    choose,
    cost_shares,
    depth_costs,
    fit_gain_model,
    price_table,
    read_signals,
)

K = len(SIGNALS)
COSTS = np.array([0.05, 0.5, 1.0])
_CONFIG = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)


def planted_slice(num_rows: int, seed: int) -> Slice:
    """Return rows in which depth 2 knows more where signal 0 is above 1, and depth 1 is the first pass with noise."""
    random = np.random.default_rng(seed)
    signals = random.normal(size=(num_rows, K)).astype(np.float32)
    truth = random.normal(size=num_rows)
    known = np.where(signals[:, 0] > 1, truth + random.normal(size=num_rows), 0.0)
    first = truth
    logits = np.stack([first, first + 0.3 * random.normal(size=num_rows), known + np.where(known == 0, truth, 0)], 1)
    true_logit = np.where(signals[:, 0] > 1, known, truth)
    clicks = random.random(num_rows) < 1 / (1 + np.exp(-true_logit))
    surfaces = surface_keys(("feed",))[np.zeros(num_rows, np.int64)]
    return Slice(signals, surfaces, (0, 1, 2), logits, clicks)


def test_requests_that_depth_helps_are_found() -> None:
    model = fit_gain_model(planted_slice(20_000, 0), COSTS)
    rows = planted_slice(20_000, 1)
    gains = model.gains(rows.signals, rows.surfaces)
    helped = rows.signals[:, 0] > 1
    losses = rows.losses()
    helped_gain = (losses[helped, 0] - losses[helped, 2]).mean()
    assert gains[helped, 2].mean() > helped_gain / 3 > 3 * gains[~helped, 2].mean()
    assert gains[:, 1].mean() < helped_gain / 10, "noise is worth nothing"
    share = float(COSTS[choose(gains, COSTS, model.price(0.3))].mean())
    assert share == pytest.approx(0.3, abs=0.05)
    chosen = choose(gains, COSTS, model.price(0.3))
    routed = losses[np.arange(len(rows)), chosen].mean()
    assert routed < losses[:, 0].mean() - 0.5 * (losses[:, 0] - losses[:, 2]).mean()


def test_an_expected_gain_is_the_mean_over_both_labels() -> None:
    rows = planted_slice(1_000, 2)
    chance = np.random.default_rng(5).random(1_000)
    expected = np.zeros((1_000, 3))
    for label, share in ((True, chance), (False, 1 - chance)):
        losses = replace(rows, clicks=np.full(1_000, label)).losses()
        expected += share[:, None] * (losses[:, :1] - losses)
    np.testing.assert_allclose(rows.expected_gains(chance), expected, atol=1e-12)


def test_a_correction_that_labels_contradict_is_believed_less_where_they_do() -> None:
    """Depth 1 is right where signal 1 is positive and wrong by as much elsewhere: worth it there, harmful here."""

    def rows(seed: int) -> Slice:
        random = np.random.default_rng(seed)
        signals = random.normal(size=(20_000, K)).astype(np.float32)
        first, correction = random.normal(size=20_000), 0.5 * random.normal(size=20_000)
        true_logit = first + np.where(signals[:, 1] > 0, correction, -correction)
        clicks = random.random(20_000) < 1 / (1 + np.exp(-true_logit))
        logits = np.stack([first, first + correction, first + correction], axis=1)
        return Slice(signals, surface_keys(("feed",))[np.zeros(20_000, np.int64)], (0, 1, 2), logits, clicks)

    model, others = fit_gain_model(rows(3), COSTS), rows(4)
    gains = model.gains(others.signals, others.surfaces)
    right, wrong = others.signals[:, 1] > 1, others.signals[:, 1] < 0
    assert gains[right, 1].mean() > 0.003
    assert gains[wrong, 1].mean() < -0.003
    np.testing.assert_allclose(gains[:, 2], gains[:, 1], atol=1e-12)
    chosen = choose(gains, COSTS, 0.0)
    assert (chosen[right] == 1).mean() > 0.6
    assert (chosen[wrong] == 0).mean() > 0.9


def test_without_labels_corrections_are_believed() -> None:
    rows = planted_slice(5, 6)
    said = believed(rows, rows.signals.astype(np.float64))
    np.testing.assert_allclose(said, 1 / (1 + np.exp(-rows.logits[:, -1])), atol=0.1)


def test_what_a_surface_gains_beyond_the_others_is_believed_with_its_rows() -> None:
    rows = planted_slice(40_000, 8)
    helped = rows.signals[:, 0] > 1
    keys = surface_keys(("feed", "reels"))
    model = fit_gain_model(replace(rows, surfaces=keys[helped.astype(np.int64)], signals=0 * rows.signals), COSTS)
    feed, reels = (model.surface[list(model.surface_keys).index(key), 2] for key in keys)
    assert reels > 0 > feed
    assert (model.surface[:, 0] == 0).all()
    alone = fit_gain_model(rows, COSTS)
    assert np.abs(alone.surface).max() < 1e-9, "one surface is no better than itself"


def _gains() -> npt.NDArray[np.float64]:
    gains = np.random.default_rng(3).normal(size=(2_000, 3)) * 0.01
    gains[:, 0] = 0
    return gains


def test_prices_fall_as_the_share_of_the_cost_rises() -> None:
    table = price_table(_gains(), COSTS)
    assert (np.diff(table[:, 0]) > 0).all()
    assert (np.diff(table[:, 1]) <= 0).all()
    assert table[0, 0] == pytest.approx(COSTS[0]), "the highest price leaves the cheapest depth"
    assert table[-1, 1] == 0
    for share, price in table[:: len(table) // 7]:
        assert COSTS[choose(_gains(), COSTS, price)].mean() == pytest.approx(share)


def test_of_two_depths_that_are_worth_the_same_the_cheaper_is_taken() -> None:
    assert choose(np.zeros((4, 3)), COSTS, 0.0).tolist() == [0, 0, 0, 0]


def test_rounding_buys_no_depth() -> None:
    assert choose(np.array([[0.0, 1e-17, 2e-17], [0.0, 0.0, 1e-6]]), COSTS, 0.0).tolist() == [0, 2]


def test_signals_are_those_that_the_encoder_reads() -> None:
    dataset, rows = tiny_dataset(), tiny_dataset().split.test.select(slice(0, 300))
    model = train(_CONFIG, dataset)
    reader = HistoryReader(dataset.log, TINY.history_length, "strict", align="right")
    expected = [model.index.requests(batch).dense[batch.request_index] for batch in request_batches(rows, reader, 100)]
    found = read_signals(dataset, rows, TINY.history_length)
    np.testing.assert_array_equal(found, np.concatenate(expected)[:, : len(SIGNALS)])


def test_weights_are_published_with_the_model_and_read_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    dataset = tiny_dataset()
    model = train(_CONFIG, dataset)
    assert model.gain is not None
    assert len(dataset.split.valid) >= ROWS_MIN
    store = WeightStore(str(tmp_path_factory.mktemp("weights")))
    reader = store.open(publish(model, _CONFIG, dataset, [], store, 1.0))
    assert GROUP in reader.groups()
    again = TrainedModel.from_weights(reader, dataset).gain
    assert isinstance(again, GainModel)
    np.testing.assert_array_equal(again.prices, model.gain.prices)
    assert again.depths == TINY.depths


def test_costs_are_shares_of_the_deepest_depth() -> None:
    flops = depth_costs(TINY)
    assert tuple(flops) == TINY.depths
    assert cost_shares(TINY)[-1] == 1.0
    assert (np.diff(cost_shares(TINY)) > 0).all()
