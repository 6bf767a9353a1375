"""The frontier reads points off by their cost, and says what the router saves."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console

from models.random_weights import TINY
from shared.errors import ConfigError
from shared.weights import WeightStore
from tests.helpers.tiny_dataset import tiny_dataset
from tests.unit.training.test_routing import COSTS, planted_slice
from training.config import TrainConfig
from training.frontier import Frontier, Point, draw_frontier, frontier_chart, frontier_of_version, show_frontier
from training.loop import train
from training.publish import publish
from training.routing import cost_shares, fit_gain_model

FLOPS = {0: 10, 1: 60, 2: 100}


def frontier() -> Frontier:
    uniform = (Point(0.1, 0.80, {0: 1}), Point(0.6, 0.79, {1: 1}), Point(1.0, 0.78, {2: 1}))
    routed = [(0.1, 0.80), (0.3, 0.785), (0.5, 0.779), (0.6, 0.781), (0.9, 0.777)]
    return Frontier(FLOPS, uniform, tuple(Point(share, ne, {0: 0.5, 1: 0, 2: 0.5}, 0.1) for share, ne in routed))


def test_equal_quality_is_the_cheapest_mix_that_is_no_worse() -> None:
    assert frontier().flops_saved_at_equal_ne == pytest.approx(0.5)


def test_no_mix_as_good_is_a_loss() -> None:
    worse = Frontier(FLOPS, frontier().uniform, frontier().routed[:2])
    assert worse.flops_saved_at_equal_ne < 0


def test_equal_cost_is_the_dearest_mix_that_costs_no_more_whatever_its_quality() -> None:
    assert frontier().at(0.65).ne == 0.781
    assert frontier().at(0.0).share == 0.1
    assert frontier().ne_gains_at_equal_flops() == pytest.approx({1: 0.79 - 0.781, 2: 0.78 - 0.777})


@pytest.mark.parametrize(("share", "ne"), [(0.1, 0.80), (0.55, 0.79), (1.0, 0.78), (0.35, 0.80 - 0.02 * 0.25 / 0.9)])
def test_a_mix_by_lot_lies_on_the_hull_of_the_tiers(share: float, ne: float) -> None:
    assert frontier().ne_of_random_mix(share) == pytest.approx(ne)


def test_a_drawn_frontier_is_shown_and_charted() -> None:
    model = fit_gain_model(planted_slice(20_000, 0), cost_shares(TINY))
    found = draw_frontier(TINY, model, planted_slice(20_000, 1))
    assert [point.share for point in found.routed] == sorted(point.share for point in found.routed)
    assert found.routed[0].share == pytest.approx(found.uniform[0].share, abs=0.02)
    assert found.flops_saved_at_equal_ne > 0.2
    text = io.StringIO()
    show_frontier(found, "v1", Console(file=text, width=120))
    for word in ("depth 0", "depth 2", "router, at most 25%", "FLOPs saved at equal NE", "drawn by lot"):
        assert word in text.getvalue()
    assert ElementTree.fromstring(frontier_chart(found, "v1")).tag.endswith("svg")
    assert found.document()["flops_saved_at_equal_ne"] == found.flops_saved_at_equal_ne
    assert len(COSTS) == len(found.uniform)


def test_a_published_version_has_a_frontier(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.frontier.dataset_of", lambda *_: tiny_dataset())
    config = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)
    model = train(config, tiny_dataset())
    store = WeightStore(str(tmp_path_factory.mktemp("weights")))
    version = publish(model, config, tiny_dataset(), [], store, 1.0)
    found = frontier_of_version(store.open(version), tmp_path_factory.getbasetemp())
    assert tuple(found.flops) == TINY.depths
    old = publish(replace(model, gain=None), config, tiny_dataset(), [], store, 1.0)
    with pytest.raises(ConfigError, match="train again"):
        frontier_of_version(store.open(old), tmp_path_factory.getbasetemp())
