"""How much each unit of a network contributes, measured while it runs: what ``models.simplify`` decides by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads import ExitHead
from models.kunlun import PersonalFeedForward
from models.network import RankingNetwork
from models.wukong import GroupBlock, InteractionLayer

_Sums = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class BlockContributions:
    """Relative contributions in one group of one layer, float64, each at least 0.

    Args:
        hidden: [hidden].
        mixtures: [k].
        mlp: [mlp tokens], the factorization-machine block's part of an output token.
        linear: [linear tokens].
        tokens: [tokens], of the output.
    """

    hidden: Tensor
    mixtures: Tensor
    mlp: Tensor
    linear: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class LayerContributions:
    """Relative contributions in one layer.

    Args:
        request: Request-only group.
        candidate: Candidate group.
        feed_forward: [hidden] of the encoder's personal feed-forward network; ones where the layer has none.
    """

    request: BlockContributions
    candidate: BlockContributions
    feed_forward: Tensor


@dataclass(frozen=True, slots=True)
class NetworkContributions:
    """Relative contributions of all units.

    Args:
        layers: One a layer.
        heads: depth -> [hidden] of the exit's heads.
    """

    layers: tuple[LayerContributions, ...]
    heads: dict[int, Tensor]


def measure_contributions(network: RankingNetwork, run: Callable[[RankingNetwork], object]) -> NetworkContributions:
    """Run the network and measure every unit.

    Args:
        network: The network.
        run: Runs a network on calibration rows, at every exit.

    Raises:
        ValueError: some part of the network did not run.
    """
    sums: dict[str, _Sums] = {}
    handles = []
    layers = [cast(InteractionLayer, layer) for layer in network.layers]
    old = network.config.layer_sizes
    encoders = [network.encoder.layer(index) for index in range(len(layers))]
    exits = {depth: network.heads.exit(depth) for depth in network.config.exits}
    for index, layer in enumerate(layers):
        handles += _watch_block(layer.request, [layer.request.up, layer.cross_up], sums, f"{index}.request")
        handles += _watch_block(layer.candidate, [layer.candidate.up], sums, f"{index}.candidate")
        if (feed_forward := encoders[index].feed_forward) is not None:
            handles.append(feed_forward.register_forward_hook(partial(_units, sums, f"{index}.encoder")))
    for depth, head in exits.items():
        handles.append(head.logits.register_forward_hook(partial(_map, sums, f"exit{depth}")))
    try:
        with torch.no_grad():
            run(network)
    finally:
        for handle in handles:
            handle.remove()
    # Two names for each block: its down map and its tokens.
    if len(sums) != 4 * len(layers) + sum(each.feed_forward is not None for each in encoders) + len(exits):
        raise ValueError(f"every layer and exit must run, ran {sorted(sums)}")
    return NetworkContributions(
        tuple(
            LayerContributions(
                _block(layer.request, [], sums, f"{index}.request"),
                _block(layer.candidate, [layer.cross_linear], sums, f"{index}.candidate"),
                _feed_forward(sums.get(f"{index}.encoder"), old[index].feed_forward_width),
            )
            for index, layer in enumerate(layers)
        ),
        {depth: _head(network, head, depth, sums[f"exit{depth}"]) for depth, head in exits.items()},
    )


def _watch_block(block: GroupBlock, readers: list[nn.Linear], sums: dict[str, _Sums], name: str) -> list[Any]:
    return [
        block.down.register_forward_hook(partial(_map, sums, f"{name}.down")),
        block.norm.register_forward_hook(partial(_tokens, sums, f"{name}.tokens")),
        block.up.register_forward_pre_hook(partial(_products, sums, f"{name}.down", block, readers)),
    ]


def _map(sums: dict[str, _Sums], name: str, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Add up squares of a map's inputs and outputs, by channel."""
    _add(sums, name, "inputs", _squares(inputs[0]))
    _add(sums, name, "outputs", _squares(output))


def _units(
    sums: dict[str, _Sums], name: str, module: PersonalFeedForward, inputs: tuple[Any, ...], output: Tensor
) -> None:
    """Add up squares of the personal network's output, and of the most that each hidden unit could be of it.

    As if every unit were open: its weights are the request's own, so one that is closed on all calibration rows may
    open for another user.
    """
    keys, values = inputs[1]
    scores = torch.bmm(inputs[0], keys.transpose(1, 2)).double()
    part = scores.square().sum(1) * values.double().square().sum(2)
    _add(sums, name, "inputs", part.sum(0))
    _add(sums, name, "outputs", output.double().square().sum()[None])


def _feed_forward(sums: _Sums | None, width: int) -> Tensor:
    """Return each hidden unit's part of the output: [hidden]."""
    if sums is None:
        return torch.ones(width, dtype=torch.float64)
    return (sums["inputs"] / sums["outputs"].clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def _tokens(sums: dict[str, _Sums], name: str, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Add up squares by token of what enters and leaves the norm: [tokens, N, D]."""
    _add(sums, name, "inputs", inputs[0].double().square().sum((1, 2)))
    _add(sums, name, "outputs", output.double().square().sum((1, 2)))


def _products(
    sums: dict[str, _Sums],
    name: str,
    block: GroupBlock,
    readers: list[nn.Linear],
    _: nn.Module,
    inputs: tuple[Any, ...],
) -> None:
    """Add up squares of each mixture column's part of the hidden layers that read the products, and of the whole."""
    flat: Tensor = inputs[0]
    columns = block.sizes.num_mixtures
    by_column = flat.view(len(flat), -1, columns)
    for place, reader in enumerate(readers):
        weight = reader.weight.view(len(reader.weight), -1, columns)
        parts = [(by_column[:, :, j] @ weight[:, :, j].t()).double().square().sum() for j in range(columns)]
        _add(sums, name, f"mixtures{place}", torch.stack(parts))
        _add(sums, name, f"reader{place}", functional.linear(flat, reader.weight).double().square().sum())


@torch.no_grad()
def _block(block: GroupBlock, cross: list[Tensor], sums: dict[str, _Sums], name: str) -> BlockContributions:
    down, tokens = sums[f"{name}.down"], sums[f"{name}.tokens"]
    num_mlp = block.sizes.num_mlp_tokens
    mlp = down["outputs"].view(num_mlp, -1).sum(1)
    mixtures = torch.stack(
        [_ratio(down[f"mixtures{place}"], down[f"reader{place}"]) for place in range(2) if f"mixtures{place}" in down]
    )
    rows = torch.cat([block.linear, *cross], dim=1).double().square().sum(1)
    return BlockContributions(
        hidden=_hidden(down, block.down.weight),
        mixtures=mixtures.amax(0),
        mlp=_ratio(mlp, tokens["inputs"][:num_mlp]),
        linear=_ratio(rows, rows.max()),
        tokens=_ratio(tokens["outputs"], tokens["outputs"].mean()),
    )


@torch.no_grad()
def _head(network: RankingNetwork, head: ExitHead, depth: int, sums: _Sums) -> Tensor:
    """Return the larger of a hidden unit's shares of the logits and, at the deepest exit, of the embedding."""
    found = _hidden(sums, head.logits.weight)
    if depth == network.config.num_layers:
        weight = network.heads.speculative.weight.double()
        part = sums["inputs"] * weight.square().sum(0)
        # Squares of the whole as if units were independent: what enters the embedding's tanh is not watched.
        found = torch.maximum(found, _ratio(part, part.sum()))
    return found


@torch.no_grad()
def _hidden(sums: _Sums, weight: Tensor) -> Tensor:
    """Return each input channel's share of a map's output."""
    return _ratio(sums["inputs"] * weight.double().square().sum(0), sums["outputs"].sum())


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return the ratio of root mean squares; 0 where the part is 0, whatever the whole is."""
    return torch.where(part > 0, part / whole, torch.zeros_like(part)).sqrt()


def _squares(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).double().square().sum(0)


def _add(sums: dict[str, _Sums], name: str, key: str, value: Tensor) -> None:
    found = sums.setdefault(name, {})
    found[key] = found[key] + value if key in found else value
