"""Times the candidate side's linears in each format, and puts formats into a network."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from models.config import RankerConfig
from models.network import RankingNetwork
from models.quantize.formats import Format, linear_in
from shared.clock import Clock

ROUNDS = 15


def eligible_names(config: RankerConfig) -> list[str]:
    """Return the names of the linears that a plan may name: those of the candidate side but the heads' logits.

    The request side runs once a request; logits, norms and the first pass decide on the order and stay in float32.
    """
    names = []
    for index in range(config.num_layers):
        names += [f"layers.{index}.candidate.{part}" for part in ("query", "attention_out", "up", "down")]
    return [*names, *(f"heads.exits.{depth}.hidden" for depth in config.exits)]


def eligible_layers(network: RankingNetwork) -> dict[str, nn.Linear]:
    """Return the linears of ``eligible_names``."""
    return {name: cast(nn.Linear, network.get_submodule(name)) for name in eligible_names(network.config)}


def with_formats(network: RankingNetwork, layers: Mapping[str, Format]) -> Callable[[], None]:
    """Put layers of a network into formats, in place; the network can then rank and no longer encode.

    Returns:
        A function that puts the linears back.

    Raises:
        ValueError: a name is not one of ``eligible_layers``.
    """
    before = eligible_layers(network)
    if unknown := sorted(set(layers) - set(before)):
        raise ValueError(f"layers must be among {sorted(before)}, name {unknown}")
    for name, number_format in layers.items():
        if number_format != "fp32":
            network.set_submodule(name, linear_in(before[name].weight, number_format))

    def undo() -> None:
        for name in layers:
            network.set_submodule(name, before[name])

    return undo


@torch.inference_mode()
def time_layers(
    layers: Mapping[str, nn.Linear],
    formats: Sequence[Format],
    counts: Sequence[int],
    clock: Clock,
    rounds: int = ROUNDS,
) -> dict[str, dict[Format, float]]:
    """Time linears at the shapes that they are served at, quantising and casting included.

    Args:
        layers: Layer name -> linear.
        formats: Formats, ``fp32`` among them.
        counts: Numbers of candidates; every layer sees each of them.
        clock: Measures.
        rounds: Repeats, the formats in turn in each.

    Returns:
        Layer -> format -> seconds, summed over the counts, medians over the rounds.
    """
    timed: dict[tuple[int, int], dict[Format, float]] = {}
    found = {}
    for name, linear in layers.items():
        # Layers of one shape take the same time; attention maps have one row a query and candidate, here one.
        shape = (linear.out_features, linear.in_features)
        if shape not in timed:
            timed[shape] = _time(linear, formats, counts, clock, rounds)
        found[name] = timed[shape]
    return found


def _time(
    linear: nn.Linear, formats: Sequence[Format], counts: Sequence[int], clock: Clock, rounds: int
) -> dict[Format, float]:
    made = {name: linear_in(linear.weight, name) for name in formats}
    total = dict.fromkeys(formats, 0.0)
    for count in counts:
        rows = torch.randn(count, linear.in_features)
        seconds: dict[Format, list[float]] = {name: [] for name in formats}
        for turn in range(rounds + 1):
            for name, module in made.items():
                begin_s = clock.monotonic_s()
                module(rows)
                if turn:  # the first warms up
                    seconds[name].append(clock.monotonic_s() - begin_s)
        for name, values in seconds.items():
            total[name] += statistics.median(values)
    return total
