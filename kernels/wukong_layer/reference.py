"""The plain truth: one candidate layer after the other, every intermediate materialised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.wukong_layer.weights import EPSILON, LayerGiven, LayerWeights, split_last


@dataclass(frozen=True, slots=True)
class ReferenceGiven:
    """What the requests give, in fp32.

    Args:
        layers: One a layer.
        mask: bool [B, T] or None.
        num_requests: B.
    """

    layers: tuple[LayerGiven, ...]
    mask: Tensor | None
    num_requests: int


class ReferenceLayers:
    """Computes in fp32; with ``dtype`` bf16 it rounds where the fused kernel stores bf16, and nowhere else.

    Args:
        weights: One a layer.
        dtype: ``torch.float32``: no rounding; ``torch.bfloat16``.
    """

    def __init__(self, weights: Sequence[LayerWeights], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights = tuple(self._round_weights(layer) for layer in weights)

    def give(self, given: Sequence[LayerGiven], mask: Tensor | None) -> ReferenceGiven:
        """Keep what the requests give; keys and values are stored in the dtype, the rest enters sums in fp32.

        What the mask hides becomes zero: a weight of 0 times a hidden NaN would be a NaN.
        """
        layers = tuple(
            LayerGiven(
                keys=self._round(_shown(layer.keys, mask if weights.num_queries else None)),
                values=self._round(_shown(layer.values, mask if weights.num_queries else None)),
                queries=layer.queries.float(),
                mixtures=layer.mixtures.float(),
                linear=layer.linear.float(),
                hidden=layer.hidden.float(),
            )
            for weights, layer in zip(self.weights, given, strict=True)
        )
        return ReferenceGiven(layers, mask, len(given[0].hidden))

    def run(self, tokens: Tensor, given: ReferenceGiven, request: Tensor) -> Tensor:
        """Run all layers: [C, n, D], request int64 [C] -> [C, tokens that leave, D] of the dtype."""
        x = self._round(tokens.float())
        for weights, layer in zip(self.weights, given.layers, strict=True):
            x = self._layer(x, weights, layer, given.mask, request)
        return x.to(self.dtype)

    def _layer(
        self, x: Tensor, weights: LayerWeights, given: LayerGiven, mask: Tensor | None, request: Tensor
    ) -> Tensor:
        both = x
        if weights.num_queries:
            both = torch.cat([x, self._seen(x, weights, given, mask, request)], dim=1)
        mixtures = self._round(weights.mixtures @ both + given.mixtures[request])
        products = (both @ mixtures.transpose(1, 2)).flatten(1)
        products = self._round(_norm(products, weights.product_epsilon) * weights.norm_products)
        hidden = self._round(torch.relu(products @ weights.up.T + given.hidden[request]))
        mlp = (hidden @ weights.down.T).view(len(x), weights.num_mlp_tokens, weights.width)
        linear = weights.linear @ both + given.linear[request]
        residual = x if weights.residual is None else weights.residual @ x
        without = x.new_zeros(len(x), weights.num_residual_tokens, weights.width)
        made = torch.cat([mlp, linear, without], dim=1)
        return self._round(_norm(made + residual, EPSILON) * weights.norm)

    def _seen(
        self, x: Tensor, weights: LayerWeights, given: LayerGiven, mask: Tensor | None, request: Tensor
    ) -> Tensor:
        mapped = self._round(weights.query_tokens @ x)
        queries = self._round(mapped @ weights.query.T + given.queries[request])
        keys, values = given.keys[request], given.values[request]
        if keys.shape[1] == 0:
            return torch.zeros_like(queries)
        q, k, v = (split_last(t, weights.num_heads).transpose(1, 2) for t in (queries, keys, values))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[request][:, None, None], -torch.inf)
        # A candidate whose request shows no key at all sees 0, not NaN.
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        numerators = torch.exp(scores - top)
        total = numerators.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        answers = self._round((self._round(numerators) @ v) / total)
        return self._round(answers.transpose(1, 2).flatten(2) @ weights.attention_out.T)

    def _round(self, x: Tensor) -> Tensor:
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def _round_weights(self, weights: LayerWeights) -> LayerWeights:
        # Gains stay fp32: they multiply fp32 values just before the one rounding.
        values = {field.name: getattr(weights, field.name) for field in fields(weights)}
        rounded = {
            name: value.float() if name in ("norm", "norm_products") else self._round(value.float())
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return LayerWeights(**{**values, **rounded})


def _shown(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.float() if mask is None else x.float().masked_fill(~mask[:, :, None], 0.0)


def _norm(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
