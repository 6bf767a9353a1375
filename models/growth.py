"""How large activations grow with depth: what the no-bias rule of Wukong Turbo is about.

A norm at the end of every layer hides growth from its output, so what is measured is what enters that norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from models.config import RankerConfig
from models.network import RankingNetwork
from models.random_request import random_candidates, random_state
from models.wukong import InteractionLayer


@dataclass(slots=True)
class LayerMaxima:
    """Largest absolute activation of one layer, before its norm, over all passes that were measured.

    Args:
        request: Of the request group's output tokens.
        candidate: Of the candidate group's output tokens.
        history: Of the encoder's tokens.
    """

    request: float = 0.0
    candidate: float = 0.0
    history: float = 0.0


@contextmanager
def activation_maxima(network: RankingNetwork) -> Iterator[list[LayerMaxima]]:
    """Measure what runs inside the block: yields one ``LayerMaxima`` a layer, filled as the network runs."""
    maxima = [LayerMaxima() for _ in network.layers]
    handles = []
    for index, found in enumerate(maxima):
        interaction = cast(InteractionLayer, network.layers[index])
        encoder = network.encoder.layer(index)
        norms = {
            "request": interaction.request.norm,
            "candidate": interaction.candidate.norm,
            "history": encoder.norm_out,
        }
        for name, norm in norms.items():
            handles.append(norm.register_forward_pre_hook(partial(_record, found, name)))
    try:
        yield maxima
    finally:
        for handle in handles:
            handle.remove()


def compare_growth(
    config: RankerConfig, num_layers: int = 16, num_rows: int = 256, seed: int = 0
) -> dict[bool, list[LayerMaxima]]:
    """Measure freshly initialised networks with and without bias on the same random inputs.

    Args:
        config: Sizes; its depth and bias are replaced.
        num_layers: Depth.
        num_rows: Candidates.
        seed: Of weights and inputs.

    Returns:
        Whether there is a bias -> one ``LayerMaxima`` a layer.
    """
    found = {}
    for bias in (False, True):
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(seed)
            deep = config.model_copy(update={"num_layers": num_layers, "bias": bias, "sizes": None})
            network = RankingNetwork(deep).eval()
            with activation_maxima(network) as maxima:
                run_on_random_inputs(network, num_rows, seed)
            found[bias] = maxima
    return found


def run_on_random_inputs(network: RankingNetwork, num_rows: int, seed: int) -> None:
    """Rank ``num_rows`` random candidates of one request with a full random history, at the deepest exit."""
    generator = torch.Generator().manual_seed(seed + 1)
    state = random_state(network, generator)
    pooled, counters, layout = random_candidates(network.config, num_rows, generator)
    network.full_pass(state, pooled, counters, None, None, layout)


def _record(found: LayerMaxima, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    setattr(found, name, max(getattr(found, name), float(inputs[0].detach().abs().max())))
