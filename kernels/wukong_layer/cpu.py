"""The best that PyTorch's own operators do: oneDNN-packed linears, the history shared by all candidates of a request.

Token-major inside, [tokens, C, D]: a map of the token axis is then one matrix product over all candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.packed_linear import PackedLinear
from kernels.wukong_layer.weights import EPSILON, LayerGiven, LayerWeights, split_last

_Record = TypeVar("_Record", LayerWeights, LayerGiven)

_ROWS_MAX = 2048
"""Query rows that are scored at once: bounds the scores at 2,048 x T a head."""


@dataclass(frozen=True, slots=True)
class TorchGiven:
    """What the requests give, in the dtype of the stack; keys and values only of the positions that may be seen.

    Args:
        layers: One a layer.
        keys: A layer and a request: [H, K, T], transposed.
        values: A layer and a request: [H, T, K].
        num_requests: B.
    """

    layers: tuple[LayerGiven, ...]
    keys: tuple[tuple[Tensor, ...], ...]
    values: tuple[tuple[Tensor, ...], ...]
    num_requests: int


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: LayerWeights
    query: PackedLinear
    attention_out: PackedLinear
    up: PackedLinear
    down: PackedLinear


class TorchLayers:
    """Stock operators in fp32 or bf16.

    Args:
        weights: One a layer.
        dtype: ``torch.float32`` or ``torch.bfloat16``.

    Raises:
        RuntimeError: this PyTorch has no oneDNN.
    """

    def __init__(self, weights: Sequence[LayerWeights], dtype: torch.dtype) -> None:
        if not torch._C._has_mkldnn:
            raise RuntimeError("the torch backend needs a PyTorch with oneDNN (torch.backends.mkldnn)")
        self.dtype = dtype
        self._layers = tuple(
            _Layer(
                _cast(layer, dtype),
                *(PackedLinear(w.to(dtype)) for w in (layer.query, layer.attention_out, layer.up, layer.down)),
            )
            for layer in weights
        )

    def give(self, given: Sequence[LayerGiven], mask: Tensor | None) -> TorchGiven:
        """Cast what the requests give, and leave out the keys that the mask hides."""
        keys: list[tuple[Tensor, ...]] = []
        values: list[tuple[Tensor, ...]] = []
        for layer, own in zip(given, self._layers, strict=True):
            if not own.weights.num_queries:
                keys.append(())
                values.append(())
                continue
            shown = torch.ones(layer.keys.shape[:2], dtype=torch.bool) if mask is None else mask
            num_heads = own.weights.num_heads
            k = [split_last(x[rows].to(self.dtype), num_heads) for x, rows in zip(layer.keys, shown, strict=True)]
            v = [split_last(x[rows].to(self.dtype), num_heads) for x, rows in zip(layer.values, shown, strict=True)]
            keys.append(tuple(x.permute(1, 2, 0).contiguous() for x in k))
            values.append(tuple(x.transpose(0, 1).contiguous() for x in v))
        layers = tuple(_cast(layer, self.dtype) for layer in given)
        return TorchGiven(layers, tuple(keys), tuple(values), len(given[0].hidden))

    def run(self, tokens: Tensor, given: TorchGiven, request: Tensor) -> Tensor:
        """Run all layers: [C, n, D], request int64 [C] -> [C, tokens that leave, D] of the dtype."""
        index = None if given.num_requests == 1 else request
        runs = [torch.nonzero(request == b)[:, 0] for b in range(given.num_requests)]
        x = tokens.detach().to(self.dtype).transpose(0, 1).contiguous()
        for position, layer in enumerate(self._layers):
            both = x
            if layer.weights.num_queries:
                queries = _mix(layer.weights.query_tokens, x)
                queries = layer.query(queries.flatten(0, 1)).view_as(queries)
                queries = queries + _of(given.layers[position].queries, index).transpose(0, 1)
                seen = torch.zeros_like(queries)
                for rows, k, v in zip(runs, given.keys[position], given.values[position], strict=True):
                    seen.index_copy_(1, rows, _attend(queries.index_select(1, rows), k, v))
                both = torch.cat([x, layer.attention_out(seen.flatten(0, 1)).view_as(seen)])
            x = _block(layer, x, both, given.layers[position], index)
        return x.transpose(0, 1).contiguous()


def _cast(record: _Record, dtype: torch.dtype) -> _Record:
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    cast: dict[str, Any] = {k: v.detach().to(dtype) for k, v in values.items() if isinstance(v, Tensor)}
    return replace(record, **cast)


def _block(layer: _Layer, x: Tensor, both: Tensor, given: LayerGiven, index: Tensor | None) -> Tensor:
    weights = layer.weights
    num_candidates = x.shape[1]
    mixtures = _mix(weights.mixtures, both) + _of(given.mixtures, index).transpose(0, 1)
    products = torch.bmm(both.transpose(0, 1), mixtures.permute(1, 2, 0)).flatten(1)
    products = _norm(products, weights.norm_products, weights.product_epsilon)
    if index is None:
        hidden = layer.up(products, given.hidden[0], "relu")
    else:
        hidden = torch.relu(layer.up(products) + given.hidden[index])
    mlp = layer.down(hidden).view(num_candidates, weights.num_mlp_tokens, weights.width).transpose(0, 1)
    linear = _mix(weights.linear, both) + _of(given.linear, index).transpose(0, 1)
    residual = x if weights.residual is None else _mix(weights.residual, x)
    made = [mlp, linear, mlp.new_zeros(weights.num_residual_tokens, num_candidates, weights.width)]
    return _norm(torch.cat(made).add_(residual), weights.norm, EPSILON)


def _norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    # functional.rms_norm is a chain of operators on the CPU, with copies in fp32: 1.5 (bf16) to 3 (fp32) times as slow.
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = torch.rsqrt(size.square_().div_(x.shape[-1]).add_(epsilon))
    return (x * factor.to(x.dtype)).mul_(gain)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend: queries [Q, C, D], keys [H, K, T], values [H, T, K] -> [Q, C, D]."""
    num_heads, head_width, num_keys = keys.shape
    if num_keys == 0:
        return torch.zeros_like(queries)
    rows = split_last((queries * head_width**-0.5).flatten(0, 1), num_heads).transpose(0, 1)
    # Two products and a softmax: 2.5 times as fast as scaled_dot_product_attention in bf16 on an AMD Zen 5, where the
    # latter runs at its fp32 rate.
    answers = [torch.bmm(torch.bmm(part, keys).softmax(-1), values) for part in torch.split(rows, _ROWS_MAX, dim=1)]
    return torch.cat(answers, dim=1).transpose(0, 1).reshape(queries.shape)


def _mix(weights: Tensor, tokens: Tensor) -> Tensor:
    """Map the token axis: [m, n] and [n, C, D] -> [m, C, D]."""
    return (weights @ tokens.flatten(1)).view(len(weights), *tokens.shape[1:])


def _of(state: Tensor, index: Tensor | None) -> Tensor:
    """Give each candidate its request's part: [B, ..] -> [C, ..], or [1, ..] of the only request."""
    return state if index is None else state.index_select(0, index)
