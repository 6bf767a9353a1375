"""The growth of a trained network is measured on real rows and on random inputs, group by group."""

from __future__ import annotations

import pytest

from benchmarks.models.growth import GROUPS, _figures, _trained
from models.growth import LayerMaxima
from models.random_weights import TINY
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig


def test_growth_is_the_last_layer_over_the_first() -> None:
    layers = [LayerMaxima(1.0, 2.0, 4.0), LayerMaxima(5.0, 9.0, 9.0), LayerMaxima(3.0, 1.0, 2.0)]
    found = {each.metric: each for each in _figures("growth_3", True, layers, {"click_ne": 0.8})}
    assert {name: each.value for name, each in found.items()} == {
        "growth_3_history_bias": 0.5,
        "growth_3_request_bias": 3.0,
        "growth_3_candidate_bias": 0.5,
    }
    assert found["growth_3_candidate_bias"].params == {"first": 2.0, "last": 1.0, "largest": 9.0, "click_ne": 0.8}


@pytest.mark.parametrize("bias", [False, True])
def test_a_trained_network_is_measured_with_its_quality(bias: bool) -> None:
    config = TrainConfig(name="tiny", dataset="synthetic", threads=1, batch_rows=256, train_share=0.05, model=TINY)
    figures = _trained(config, tiny_dataset(), bias)
    assert len(figures) == 2 * len(GROUPS)
    for each in figures:
        assert each.value > 0
        assert 0.5 < float(each.params["click_ne"]) < 2
        assert each.metric.endswith("_bias")
        assert each.metric.endswith("no_bias") != bias
