"""Structured sparsity at publish time: finds units that contribute nothing or little, and makes the matrices smaller.

Units, and what a unit's contribution is compared with, as root mean squares over calibration rows:

* a hidden unit of a factorization-machine block, of the encoder's feed-forward network or of an exit's heads: its part
  of the next map's output, against that output (a ReLU that is never open contributes 0; a unit of the feed-forward
  network, whose weights are the request's own, counts as if it were open);
* a mixture column of ``X^T Y``: its products' part of the hidden layers that read them, against those;
* an output token's part from the factorization-machine block: against the sum that enters the norm;
* a row of the linear compression: its weights' norm, against the layer's largest;
* an output token: its value after the norm, against the mean over the tokens.

Units at or under the threshold go, at least one of each kind stays, and every map that reads or makes them is indexed
anew. With threshold 0 exactly zero contributions go, and on rows like the calibration rows the outputs stay what they
were. The norm of the products keeps dividing by their former number (``BlockSizes.num_products_counted``).

Source: the "sparsity-based simplification that reduces redundant components in the linear layers" of Meta's Adaptive
Ranking Model blog, which gives no pattern; these units and thresholds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from models.config import RankerConfig
from models.contributions import BlockContributions, measure_contributions
from models.network import RankingNetwork
from models.sizes import BlockSizes, LayerSizes, NetworkSizes

Group: TypeAlias = Literal["request", "candidate"]
Indices: TypeAlias = list[int]
Weights: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Removal:
    """Units of one kind in one place.

    Args:
        place: Where, such as ``layer 1 candidate``.
        unit: Kind of unit.
        before: How many there were.
        after: How many stayed.
    """

    place: str
    unit: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Simplified:
    """A smaller network.

    Args:
        network: The network, with the sizes in its configuration.
        removals: What was looked at: one entry for each place and kind of unit.
    """

    network: RankingNetwork
    removals: tuple[Removal, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Old indices, in their new order, of what stays of one group in one layer."""

    hidden: Indices
    mixtures: Indices
    mlp: Indices
    linear: Indices
    residual: Indices

    @property
    def tokens(self) -> Indices:
        """Output tokens."""
        return [*self.mlp, *self.linear, *self.residual]


def simplify(
    network: RankingNetwork, run: Callable[[RankingNetwork], object], threshold: float = 0.0, multiple: int = 1
) -> Simplified:
    """Make a network smaller; the given one stays as it is.

    Args:
        network: Network without biases.
        run: Runs a network on calibration rows, all exits of it.
        threshold: Largest relative contribution of a unit that is removed, in ``[0, 1)``.
        multiple: Hidden widths stay multiples of this where they were: the units that contribute most among those to be
            removed stay.

    Raises:
        ValueError: the threshold or the multiple is out of range, or the network has biases, which removal would lose.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), is {threshold}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, is {multiple}")
    config = network.config
    if config.bias:
        raise ValueError("a network with bias cannot be simplified: removing a unit would remove its bias as well")
    found = measure_contributions(network, run)
    old = config.layer_sizes
    kept: list[dict[Group, _Kept]] = [
        {
            "request": _kept(sizes.request, layer.request, threshold, multiple),
            "candidate": _kept(sizes.candidate, layer.candidate, threshold, multiple),
        }
        for sizes, layer in zip(old, found.layers, strict=True)
    ]
    feed_forward = [_over(layer.feed_forward, threshold, multiple) for layer in found.layers]
    heads = {depth: _over(values, threshold, multiple) for depth, values in found.heads.items()}
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    sizes = []
    for index, before in enumerate(old):
        inputs: dict[Group, Indices] = {
            group: kept[index - 1][group].tokens if index else list(range(getattr(before, group).num_inputs))
            for group in kept[index]
        }
        sizes.append(_cut_layer(weights, index, before, kept[index], inputs, feed_forward[index]))
    _cut_heads(weights, config, kept, heads)
    smaller = config.model_copy(
        update={"sizes": NetworkSizes(layers=tuple(sizes), head_widths=tuple(len(heads[d]) for d in config.exits))}
    )
    with torch.device("meta"):
        made = RankingNetwork(smaller)
    # Copies with rows in order: what indexing leaves may be transposed in memory, which sums in another order.
    made.load_state_dict(
        {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}, assign=True
    )
    return Simplified(
        made.requires_grad_(False).train(network.training), tuple(_removals(config, kept, feed_forward, heads))
    )


def num_parameters(network: RankingNetwork) -> int:
    """Return the number of weights."""
    return sum(parameter.numel() for parameter in network.parameters())


# ---------------------------------------------------------------------------------------------------- what stays


def _kept(sizes: BlockSizes, found: BlockContributions, threshold: float, multiple: int) -> _Kept:
    alive = set(_over(found.tokens, threshold))
    with_mlp = set(_over(found.mlp, threshold))
    with_linear = {sizes.num_mlp_tokens + row for row in _over(found.linear, threshold)}
    mlp = [token for token in range(sizes.num_mlp_tokens) if token in alive & with_mlp]
    linear = [token for token in range(sizes.num_mlp_tokens, sizes.num_tokens) if token in alive & with_linear]
    # A block without a token of its own would need maps without rows: one stays, whatever it contributes.
    mlp = mlp or [int(found.mlp.argmax())]
    linear = linear or [sizes.num_mlp_tokens + int(found.linear.argmax())]
    residual = [token for token in range(sizes.num_tokens) if token in alive and token not in {*mlp, *linear}]
    return _Kept(
        hidden=_over(found.hidden, threshold, multiple),
        mixtures=_over(found.mixtures, threshold),
        mlp=mlp,
        linear=linear,
        residual=residual,
    )


def _over(contributions: Tensor, threshold: float, multiple: int = 1) -> Indices:
    """Return the places of contributions over the threshold, and of the next ones up to a multiple; at least one."""
    count = max(int((contributions > threshold).sum()), 1)
    count = min(-(-count // multiple) * multiple, len(contributions))
    return sorted(torch.argsort(contributions, descending=True, stable=True)[:count].tolist())


def _removals(
    config: RankerConfig, kept: list[dict[Group, _Kept]], feed_forward: list[Indices], heads: dict[int, Indices]
) -> list[Removal]:
    rows = []
    for index, sizes in enumerate(config.layer_sizes):
        for group, stays in kept[index].items():
            before: BlockSizes = getattr(sizes, group)
            place = f"layer {index + 1} {group}"
            rows += [
                Removal(place, "hidden units", before.hidden_width, len(stays.hidden)),
                Removal(place, "mixture columns", before.num_mixtures, len(stays.mixtures)),
                Removal(place, "tokens of the FM block", before.num_mlp_tokens, len(stays.mlp)),
                Removal(place, "rows of the linear block", before.num_linear_tokens, len(stays.linear)),
                Removal(place, "output tokens", before.num_tokens, len(stays.tokens)),
            ]
        place = f"layer {index + 1} encoder"
        rows.append(Removal(place, "hidden units", sizes.feed_forward_width, len(feed_forward[index])))
    for depth, width in config.head_widths.items():
        rows.append(Removal(f"exit {depth} heads", "hidden units", width, len(heads[depth])))
    return rows


# ---------------------------------------------------------------------------------------------------- smaller maps


def _cut_layer(
    weights: Weights,
    index: int,
    before: LayerSizes,
    kept: dict[Group, _Kept],
    inputs: dict[Group, Indices],
    feed_forward: Indices,
) -> LayerSizes:
    """Replace the maps of one layer in ``weights`` by smaller ones; returns the layer's sizes."""
    name, other = f"layers.{index}", kept["candidate"]
    seen = {group: _seen(getattr(before, group), inputs[group]) for group in inputs}
    products = {
        group: [
            token * getattr(before, group).num_mixtures + column for token in seen[group] for column in stays.mixtures
        ]
        for group, stays in kept.items()
    }
    made = {
        group: _cut_block(
            weights, f"{name}.{group}", getattr(before, group), stays, inputs[group], seen[group], products[group]
        )
        for group, stays in kept.items()
    }
    first_linear = before.candidate.num_mlp_tokens
    _take(weights, f"{name}.cross_query_tokens", None, inputs["request"])
    _take(weights, f"{name}.cross_mixtures", other.mixtures, seen["request"])
    _take(weights, f"{name}.cross_linear", [token - first_linear for token in other.linear], seen["request"])
    _take(weights, f"{name}.cross_up.weight", other.hidden, products["request"])
    encoder = f"encoder.layers.{index}"
    for name in ("keys", "values", "key_mix", "value_mix"):
        if f"{encoder}.feed_forward.{name}" in weights:
            _take(weights, f"{encoder}.feed_forward.{name}", feed_forward, None)
    return LayerSizes(request=made["request"], candidate=made["candidate"], feed_forward_width=len(feed_forward))


def _cut_block(
    weights: Weights,
    name: str,
    before: BlockSizes,
    kept: _Kept,
    inputs: Indices,
    seen: Indices,
    products: Indices,
) -> BlockSizes:
    width = len(weights[f"{name}.norm.weight"])
    rows = [token - before.num_mlp_tokens for token in kept.linear]
    _take(weights, f"{name}.query_tokens", None, inputs)
    _take(weights, f"{name}.mixtures", kept.mixtures, seen)
    _take(weights, f"{name}.linear", rows, seen)
    _take(weights, f"{name}.up.weight", kept.hidden, products)
    _take(weights, f"{name}.down.weight", _channels(kept.mlp, width), kept.hidden)
    gain = weights[f"{name}.norm_products.weight"]
    weights[f"{name}.norm_products.weight"] = gain[products] * math.sqrt(len(gain) / len(products))
    has_map = _cut_residual(weights, f"{name}.residual", before, kept.tokens, inputs)
    return BlockSizes(
        num_inputs=len(inputs),
        num_seen=len(seen),
        num_queries=before.num_queries,
        num_mixtures=len(kept.mixtures),
        num_mlp_tokens=len(kept.mlp),
        num_linear_tokens=len(kept.linear),
        num_residual_tokens=len(kept.residual),
        hidden_width=len(kept.hidden),
        num_products_counted=before.num_products_counted,
        has_residual_map=has_map,
    )


def _cut_residual(weights: Weights, name: str, before: BlockSizes, tokens: Indices, inputs: Indices) -> bool:
    """Cut the residual map, or make one where inputs and outputs no longer pair up; returns whether there is one."""
    matrix = weights[name] if before.has_residual_map else torch.eye(before.num_inputs)
    matrix = matrix[tokens][:, inputs]
    if not before.has_residual_map and torch.equal(matrix, torch.eye(len(inputs))):
        return False
    weights[name] = matrix
    return True


def _cut_heads(
    weights: Weights, config: RankerConfig, kept: list[dict[Group, _Kept]], heads: dict[int, Indices]
) -> None:
    width = config.width
    for depth, hidden in heads.items():
        name, tokens = f"heads.exits.{depth}", kept[depth - 1]
        _take(weights, f"{name}.cross.weight", hidden, _channels(tokens["request"].tokens, width))
        _take(weights, f"{name}.hidden.weight", hidden, _channels(tokens["candidate"].tokens, width))
        _take(weights, f"{name}.logits.weight", None, hidden)
    _take(weights, "heads.speculative.weight", None, heads[config.num_layers])
    _take(weights, "first.user.weight", None, _channels(kept[-1]["request"].tokens, width))


def _take(weights: Weights, name: str, rows: Indices | None, columns: Indices | None) -> None:
    """Keep rows and columns of a matrix, None all."""
    matrix = weights[name]
    matrix = matrix if rows is None else matrix[rows]
    weights[name] = matrix if columns is None else matrix[:, columns]


def _channels(tokens: Indices, width: int) -> Indices:
    return [token * width + channel for token in tokens for channel in range(width)]


def _seen(before: BlockSizes, inputs: Indices) -> Indices:
    """Return what the block still mixes: inputs that stay, and all that the group has seen of the history."""
    return [*inputs, *range(before.num_inputs, before.num_seen)]
