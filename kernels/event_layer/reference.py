"""The plain truth, in fp32, or rounded to bf16 where the C++ form stores bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from kernels.event_layer.weights import EPSILON, LayerGiven, LayerMade, LayerWeights, SelfAttention


class ReferenceLayers:
    """The stack in plain PyTorch.

    Args:
        weights: One a layer, checked.
        attention: Of the layers with self-attention.
        dtype: ``torch.float32`` or ``torch.bfloat16``.
    """

    def __init__(self, weights: Sequence[LayerWeights], attention: SelfAttention | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._attention = attention
        self._layers = [self._rounded(layer) for layer in weights]

    def run(self, tokens: Tensor, clock: Tensor, num_before: int, given: Sequence[LayerGiven]) -> list[LayerMade]:
        """Run all layers: see ``kernels.event_layer.append``."""
        x = tokens.float()
        made = []
        for layer, own in zip(self._layers, given, strict=True):
            if layer.norm_feed_forward is not None and own.hidden is not None:
                keys, values = (part.float() for part in own.hidden)
                hidden = self._round(torch.relu(self._norm(x, layer.norm_feed_forward) @ keys.T))
                x = self._round(x + hidden @ values)
            window = None
            if layer.norm_attention is not None and layer.attention_out is not None and own.window is not None:
                answers, window = self._attend(x, layer, own.window, clock, num_before)
                x = self._round(x + answers @ layer.attention_out.T)
            keys, values = self._round(self._norm(x, layer.norm) @ layer.key_value.T).chunk(2, dim=-1)
            made.append(LayerMade(keys.to(self.dtype), values.to(self.dtype), window))
        return made

    def _attend(
        self, x: Tensor, layer: LayerWeights, before: tuple[Tensor, Tensor], clock: Tensor, num_before: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attention, norm, weight = self._attention, layer.norm_attention, layer.query_key_value
        assert attention is not None  # checked when packed
        assert norm is not None
        assert weight is not None
        heads = (len(x), attention.num_heads, -1)
        made = (self._norm(x, norm) @ weight.T).chunk(3, dim=-1)
        q, k, v = (part.reshape(heads) for part in made)
        turn = _turns(attention, clock, num_before)
        q, k, v = self._round(_rotate(q, turn)), self._round(_rotate(k, turn)), self._round(v)
        keys, values = torch.cat([before[0].float(), k]), torch.cat([before[1].float(), v])
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        place = torch.arange(len(keys))
        own = place[-len(x) :, None]
        seen = (place <= own) & (place // attention.block > own // attention.block - attention.window_blocks)
        scores = scores.masked_fill(~seen, -torch.inf)
        numerators = torch.exp(scores - scores.amax(-1, keepdim=True))
        found = torch.einsum("hqk,khd->hqd", self._round(numerators), values) / numerators.sum(-1, keepdim=True)
        return self._round(found.transpose(0, 1).flatten(1)), (keys.to(self.dtype), values.to(self.dtype))

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return self._round(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * gain)

    def _round(self, x: Tensor) -> Tensor:
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def _rounded(self, layer: LayerWeights) -> LayerWeights:
        values = {each.name: getattr(layer, each.name) for each in fields(layer)}
        own = {name: x.detach().float().clone() for name, x in values.items() if x is not None}
        # Gains stay fp32: they multiply fp32 values just before the one rounding.
        return LayerWeights(**{name: x if x.dim() == 1 else self._round(x) for name, x in own.items()})


def _turns(attention: SelfAttention, clock: Tensor, num_before: int) -> Tensor:
    """Return by how much each pair of channels is turned: complex64 [n, 1, K / 2]."""
    positions = torch.arange(num_before, num_before + len(clock), dtype=torch.float64)
    angles = torch.cat([positions[:, None] * attention.by_position, clock[:, None] * attention.by_time], dim=-1)
    circle = torch.remainder(angles, 2 * torch.pi).float()
    return torch.polar(torch.ones_like(circle), circle)[:, None]


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)
