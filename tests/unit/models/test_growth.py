"""Activation growth is measured before the norms, layer by layer, and an offset makes it grow."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch

from models.config import RankerConfig
from models.growth import activation_maxima, compare_growth, run_on_random_inputs
from models.network import RankingNetwork
from models.random_weights import TINY
from models.wukong import InteractionLayer

_NAMES = ("request", "candidate", "history")


def test_sixteen_layers_with_and_without_bias() -> None:
    found = compare_growth(RankerConfig(), num_rows=64)
    for maxima in found.values():
        assert len(maxima) == 16
        assert all(
            math.isfinite(getattr(layer, name)) and getattr(layer, name) > 0 for layer in maxima for name in _NAMES
        )


def test_an_offset_in_every_layer_adds_up_where_there_is_one() -> None:
    encoder = TINY.encoder.model_copy(update={"comp_skip": False})
    config = TINY.model_copy(update={"num_layers": 16, "bias": True, "encoder": encoder})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = RankingNetwork(config)
    with activation_maxima(network) as before:
        run_on_random_inputs(network, 8, seed=0)
    for index in range(16):
        attention_out = network.encoder.layer(index).attention_out
        assert attention_out is not None
        attention_out.bias.data += 20.0
    with activation_maxima(network) as after:
        run_on_random_inputs(network, 8, seed=0)
    assert after[0].history > before[0].history
    assert after[15].history > 8 * after[0].history


def test_the_same_seed_measures_the_same() -> None:
    assert compare_growth(TINY, 3, 8, seed=4) == compare_growth(TINY, 3, 8, seed=4)


def test_hooks_are_gone_afterwards() -> None:
    network = RankingNetwork(TINY)
    with pytest.raises(RuntimeError, match="boom"), activation_maxima(network) as maxima:
        raise RuntimeError("boom")
    cast(InteractionLayer, network.layers[0]).request.norm(torch.ones(1, TINY.width))
    assert [layer.request for layer in maxima] == [0.0, 0.0]
