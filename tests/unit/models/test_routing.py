"""The gain model: its formula, its arrays in a weights version, signals that age, and what tiers cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from models.config import RankerConfig, TierConfig
from models.flops import ranking_flops
from models.inputs import NUM_SURPRISES, request_inputs
from models.routing import GROUP, SIGNALS, GainModel, aged, surface_keys, tier_flops
from models.source import MemorySource
from shared.errors import WeightsError

DEPTHS = (0, 1, 2)
K = len(SIGNALS)


def gain_model(seed: int = 0) -> GainModel:
    draw = np.random.default_rng(seed).normal
    return GainModel(
        depths=DEPTHS,
        mean=draw(size=K),
        deviation=1 + np.abs(draw(size=K)),
        hidden=draw(size=(K, 4)),
        bias=draw(size=4),
        out=draw(size=(4, 3)),
        worth=np.array([0.0, 0.5, 2.0]),
        unknown=np.array([0.0, 0.1, 0.2]),
        surface_keys=surface_keys(("feed", "reels")),
        surface=np.array([[0.0, 1.0, 2.0], [0.0, 10.0, 20.0]]),
        prices=np.array([[0.1, 3.0], [0.5, 1.0], [1.0, 0.0]]),
    )


def test_gains_are_what_the_module_says_row_by_row() -> None:
    model, signals = gain_model(), np.random.default_rng(1).normal(size=(5, K)).astype(np.float32)
    found = model.gains(signals, surface_keys(("reels", "feed", "elsewhere", "feed", "reels")))
    for row, extra in enumerate((10.0, 1.0, 0.0, 1.0, 10.0)):
        scaled = (signals[row] - model.mean) / model.deviation
        fitted = np.maximum(scaled @ model.hidden + model.bias, 0) @ model.out
        expected = fitted * model.worth + np.array([0, extra, 2 * extra])
        np.testing.assert_allclose(found[row, 1:], expected[1:], rtol=1e-9)
    assert (found[:, 0] == 0).all()


def test_a_weights_version_gives_the_model_back() -> None:
    model = gain_model()
    source = MemorySource("v", {GROUP: model.tensors()})
    found = GainModel.from_weights(source, DEPTHS)
    assert found is not None
    signals = np.ones((2, K), np.float32)
    keys = surface_keys(("feed", "reels"))
    np.testing.assert_array_equal(found.gains(signals, keys), model.gains(signals, keys))
    assert found.price(0.3) == model.price(0.3) == pytest.approx(2.0)


def test_a_version_without_a_model_has_none_and_one_of_another_form_is_refused() -> None:
    assert GainModel.from_weights(MemorySource("v"), DEPTHS) is None
    with pytest.raises(WeightsError, match="worth"):
        GainModel.from_weights(MemorySource("v", {GROUP: gain_model().tensors()}), (0, 1))
    fewer = replace(gain_model(), mean=np.zeros(K - 1))
    with pytest.raises(WeightsError, match="mean"):
        GainModel.from_weights(MemorySource("v", {GROUP: fewer.tensors()}), DEPTHS)


@pytest.mark.parametrize(("share", "price"), [(0.0, 3.0), (0.1, 3.0), (0.75, 0.5), (1.0, 0.0), (2.0, 0.0)])
def test_a_price_leads_to_a_share_of_the_cost(share: float, price: float) -> None:
    assert gain_model().price(share) == pytest.approx(price)


def _signals(as_of_s: int, num_events: int = 3) -> npt.NDArray[np.float32]:
    times = np.array([[1_000, 2_000, 5_000]])[:, :num_events]
    found: npt.NDArray[np.float32] = request_inputs(
        np.zeros((1, 0), np.int64),
        np.ones((1, num_events), np.int64),
        np.full((1, num_events), 4.0, np.float32),
        times,
        np.ones((1, num_events), np.bool_),
        np.array([num_events]),
        np.array([as_of_s]),
        3,
        1,
        np.zeros((2, NUM_SURPRISES), np.float32),
    ).dense[0, :-NUM_SURPRISES]
    return found


def test_signals_age_as_if_they_were_read_later() -> None:
    early, late = _signals(6_000), _signals(6_000 + 90_000)
    found = aged(early, 90_000)
    hour = SIGNALS.index("hour_share")
    kept = np.arange(K) != hour
    np.testing.assert_allclose(found[kept], late[kept], rtol=1e-5)
    assert found[hour] == early[hour]
    np.testing.assert_array_equal(aged(early, -5.0), aged(early, 0.0))


def test_no_history_does_not_age() -> None:
    nothing = _signals(6_000, num_events=0)
    np.testing.assert_array_equal(aged(nothing, 1e6), nothing)


@pytest.mark.parametrize("num_candidates", [1, 300])
def test_a_tier_costs_its_passes_over_all_and_over_the_head(num_candidates: int) -> None:
    tiers = {
        "light": TierConfig(head_max=0),
        "mid": TierConfig(head_max=500, num_layers=1),
        "full": TierConfig(head_max=500),
    }
    config = RankerConfig(tiers=tiers)
    num_tokens = config.encoder.num_tokens
    for tier, depth in (("light", 0), ("mid", 1), ("full", 2)):
        expected = ranking_flops(config, depth, num_tokens, num_candidates).shared
        assert tier_flops(config, tier, num_candidates) == expected
    head = RankerConfig(tiers={**tiers, "full": TierConfig(head_max=100)})
    # Beyond the head a candidate costs what it costs on the first pass.
    grown = tier_flops(head, "full", 400) - tier_flops(head, "full", 200)
    assert grown == tier_flops(head, "light", 400) - tier_flops(head, "light", 200)
