"""What one layer's candidate side is made of: its own weights, and what the requests give to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

EPSILON = 1e-6
"""Of both norms, as in ``models.layers.norm``."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of the candidate side of one layer, any floating dtype; n tokens enter, s = n + Q are seen.

    The fields are those of ``models.wukong.GroupBlock``.

    Args:
        query_tokens: [Q, n]; Q may be 0: then no history is looked at, and ``query`` and ``attention_out`` are unused.
        query: [D, D].
        attention_out: [D, D].
        mixtures: [k, s], the candidate half of Y.
        norm_products: [s * k], gain of the norm over the flattened products.
        up: [hidden, s * k].
        down: [mlp tokens * D, hidden].
        linear: [linear tokens, s].
        residual: [tokens that leave, n], None: identity, where as many tokens leave as enter.
        norm: [D], gain of the norm of each token that leaves.
        num_heads: H, divides D.
        num_residual_tokens: Tokens that leave with a residual alone, behind the others.
        product_epsilon: Of the norm over the products; a simplified model changes it, so that removed products count.
    """

    query_tokens: Tensor
    query: Tensor
    attention_out: Tensor
    mixtures: Tensor
    norm_products: Tensor
    up: Tensor
    down: Tensor
    linear: Tensor
    residual: Tensor | None
    norm: Tensor
    num_heads: int
    num_residual_tokens: int = 0
    product_epsilon: float = EPSILON

    @property
    def num_tokens(self) -> int:
        """Tokens that enter: n."""
        return self.query_tokens.shape[1]

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.query_tokens.shape[0]

    @property
    def num_seen(self) -> int:
        """Tokens that are mixed: s."""
        return self.num_tokens + self.num_queries

    @property
    def num_mixtures(self) -> int:
        """Columns of the factorization machine: k."""
        return self.mixtures.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the hidden layer."""
        return self.up.shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.norm.shape[0]

    @property
    def num_mlp_tokens(self) -> int:
        """Tokens that the factorization-machine block gives."""
        return self.down.shape[0] // self.width

    @property
    def num_linear_tokens(self) -> int:
        """Tokens that the linear compression gives."""
        return self.linear.shape[0]

    @property
    def num_out(self) -> int:
        """Tokens that leave."""
        return self.num_mlp_tokens + self.num_linear_tokens + self.num_residual_tokens

    def check(self, name: str) -> None:
        """Check that the shapes belong together.

        Raises:
            ValueError: naming the weight, the shape it must have and the one it has.
        """
        _check_fields(name, self, {"query_tokens": 2, "mixtures": 2, "up": 2, "down": 2, "linear": 2, "norm": 1})
        width, seen = self.width, self.num_seen
        wanted = {
            "query": (width, width),
            "attention_out": (width, width),
            "mixtures": (self.num_mixtures, seen),
            "norm_products": (seen * self.num_mixtures,),
            "up": (self.hidden, seen * self.num_mixtures),
            "down": (self.num_mlp_tokens * width, self.hidden),
            "linear": (self.num_linear_tokens, seen),
        }
        if self.residual is not None:
            wanted["residual"] = (self.num_out, self.num_tokens)
        elif self.num_out != self.num_tokens:
            raise ValueError(f"{name}.residual must be given: {self.num_tokens} tokens enter, {self.num_out} leave")
        for field, shape in wanted.items():
            found = tuple(getattr(self, field).shape)
            if found != shape:
                raise ValueError(f"{name}.{field} must be {list(shape)}, is {list(found)}")
        counts = (self.num_tokens, self.num_mixtures, self.hidden, width, self.num_heads, self.num_mlp_tokens)
        if min(counts) < 1:
            raise ValueError(f"{name} must have tokens, mixtures, hidden units, width, heads, mlp tokens; has {counts}")
        if self.num_residual_tokens < 0 or not 0.0 < self.product_epsilon < 1.0:
            has = f"{self.num_residual_tokens} and {self.product_epsilon}"
            raise ValueError(f"{name} must have num_residual_tokens >= 0 and product_epsilon in (0, 1), has {has}")
        if width % self.num_heads:
            raise ValueError(f"{name}.num_heads must divide the width {width}, is {self.num_heads}")


@dataclass(frozen=True, slots=True)
class LayerGiven:
    """What the request side gives to the candidates of B requests in one layer, any floating dtype.

    The fields are those of ``models.wukong.Contributions``.

    Args:
        keys: [B, T, D] of the encoded history; T may be 0.
        values: [B, T, D].
        queries: [B, Q, D], request half of the queries.
        mixtures: [B, k, D], request half of X^T Y.
        linear: [B, linear tokens, D], request half of the linear compression.
        hidden: [B, hidden], request half of the hidden layer.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    mixtures: Tensor
    linear: Tensor
    hidden: Tensor

    def check(self, name: str, weights: LayerWeights) -> None:
        """Check that the shapes are those that a layer reads.

        Raises:
            ValueError: naming the tensor, the shape it must have and the one it has.
        """
        _check_fields(name, self, {"hidden": 2, "keys": 3} if weights.num_queries else {"hidden": 2})
        num_requests, width = len(self.hidden), weights.width
        wanted = {
            "queries": (num_requests, weights.num_queries, width),
            "mixtures": (num_requests, weights.num_mixtures, width),
            "linear": (num_requests, weights.num_linear_tokens, width),
            "hidden": (num_requests, weights.hidden),
        }
        if weights.num_queries:
            wanted["keys"] = wanted["values"] = (num_requests, self.keys.shape[1], width)
        for field, shape in wanted.items():
            found = tuple(getattr(self, field).shape)
            if found != shape:
                raise ValueError(f"{name}.{field} must be {list(shape)}, is {list(found)}")


def _check_fields(name: str, given: LayerWeights | LayerGiven, dims: dict[str, int]) -> None:
    """Check what sizes are read from before they are, and what C takes for granted.

    Raises:
        ValueError: a tensor is not floating-point, not on the CPU, or has another number of axes.
    """
    for field in fields(given):
        x = getattr(given, field.name)
        if not isinstance(x, Tensor):
            continue
        if not x.is_floating_point() or x.device.type != "cpu":
            raise ValueError(f"{name}.{field.name} must be floating-point on the CPU, is {x.dtype} on {x.device}")
        if x.dim() != dims.get(field.name, x.dim()):
            raise ValueError(f"{name}.{field.name} must have {dims[field.name]} axes, is {list(x.shape)}")
        if field.name == "norm" and not len(x):
            raise ValueError(f"{name}.norm must have the width of a token, at least 1, is [0]")


def copy_of(weights: LayerWeights) -> LayerWeights:
    """Return the weights in memory of their own, so that a later change in place does not reach them."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    copies: dict[str, Any] = {k: v.detach().clone() for k, v in values.items() if isinstance(v, Tensor)}
    return replace(weights, **copies)


def split_last(x: Tensor, count: int) -> Tensor:
    """Split the last axis into ``count`` equal parts: [.., count * w] -> [.., count, w]."""
    return x.reshape(*x.shape[:-1], count, -1) if x.numel() else x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def check_weights(layers: Sequence[LayerWeights]) -> None:
    """Check each layer, and that each gives what the next one takes.

    Raises:
        ValueError: there is no layer, or two do not fit.
    """
    if not layers:
        raise ValueError("weights must have at least one layer, have 0")
    for index, layer in enumerate(layers):
        layer.check(f"weights[{index}]")
        before = layers[index - 1]
        if index and (before.num_out != layer.num_tokens or before.width != layer.width):
            raise ValueError(
                f"weights[{index}] must take {before.num_out} tokens of width {before.width}, "
                f"takes {layer.num_tokens} of width {layer.width}"
            )
