"""What one layer of the history encoder is made of, what it has of one user, and what it makes of new events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

EPSILON = 1e-6
"""Of all norms, as in ``models.layers.norm``."""

SIZE_MAX = 2**31
"""Largest block, and most blocks of a window: their product fits 64 bits."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, any floating dtype. There are no biases.

    Args:
        norm: [D], gain of the norm before keys and values.
        key_value: [2 D, D], keys first.
        norm_feed_forward: [D]; None: the layer has no feed-forward network.
        norm_attention: [D]; None: the layer has no self-attention, nor the next two.
        query_key_value: [3 D, D].
        attention_out: [D, D].
    """

    norm: Tensor
    key_value: Tensor
    norm_feed_forward: Tensor | None = None
    norm_attention: Tensor | None = None
    query_key_value: Tensor | None = None
    attention_out: Tensor | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.norm.shape[0]

    def check(self, name: str) -> None:
        """Check that the shapes belong together.

        Raises:
            ValueError: naming the weight, what it must be and what it is.
        """
        if self.norm.dim() != 1 or not len(self.norm):
            raise ValueError(f"{name}.norm must be [D], D at least 1, is {list(self.norm.shape)}")
        width = self.width
        shapes = {"key_value": (2 * width, width), "query_key_value": (3 * width, width), "attention_out": (width,) * 2}
        attention = [self.norm_attention is None, self.query_key_value is None, self.attention_out is None]
        if any(attention) and not all(attention):
            raise ValueError(f"{name} must have norm_attention, query_key_value and attention_out, or none of them")
        for each in fields(self):
            x, wanted = getattr(self, each.name), shapes.get(each.name, (width,))
            if x is None:
                continue
            if tuple(x.shape) != wanted:
                raise ValueError(f"{name}.{each.name} must be {list(wanted)}, is {list(x.shape)}")
            if not x.is_floating_point() or x.device.type != "cpu":
                raise ValueError(f"{name}.{each.name} must be floating-point on the CPU, is {x.dtype} on {x.device}")


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """What the layers with self-attention share.

    Args:
        num_heads: H, divides D; K must be even.
        block: Events of a block.
        window_blocks: Blocks that an event sees, its own up to itself among them.
        by_position: float64, radians by which the first pairs of a head's channels turn an event.
        by_time: float64, radians by which the other pairs turn a unit of the clock; K / 2 pairs in all.
    """

    num_heads: int
    block: int
    window_blocks: int
    by_position: Tensor
    by_time: Tensor

    def window_of(self, num_before: int) -> int:
        """Return how many of the earlier events the next one sees, and those behind it in its block."""
        return num_before - max(num_before // self.block - self.window_blocks + 1, 0) * self.block

    def check(self, width: int) -> None:
        """Check against a width.

        Raises:
            ValueError: a value breaks a rule.
        """
        for name, size in (("block", self.block), ("window_blocks", self.window_blocks)):
            if not 1 <= size <= SIZE_MAX or size % 1:
                raise ValueError(f"{name} must be a whole number in [1, {SIZE_MAX}], is {size}")
        if self.num_heads < 1 or width % (2 * self.num_heads):
            raise ValueError(f"num_heads must be at least 1 and twice it divide the width {width}, is {self.num_heads}")
        for name, x in (("by_position", self.by_position), ("by_time", self.by_time)):
            if x.dim() != 1 or x.dtype != torch.float64 or x.device.type != "cpu":
                raise ValueError(f"{name} must be torch.float64 [pairs] on the CPU, is {x.dtype} {list(x.shape)}")
        pairs = len(self.by_position) + len(self.by_time)
        if pairs != width // self.num_heads // 2:
            wanted = width // self.num_heads // 2
            raise ValueError(f"by_position and by_time must be of {wanted} pairs of channels, are of {pairs}")


@dataclass(frozen=True, slots=True)
class LayerGiven:
    """What one layer has of the user.

    Args:
        hidden: Keys and values of the feed-forward network's hidden units, [m, D]; None without a network.
        window: Turned keys, and values, of the earlier events that new ones see, [w, H, K], as many as
            ``SelfAttention.window_of`` says; None without self-attention.
    """

    hidden: tuple[Tensor, Tensor] | None = None
    window: tuple[Tensor, Tensor] | None = None

    def check(
        self, index: int, weights: LayerWeights, attention: SelfAttention | None, dtype: torch.dtype, window: int
    ) -> None:
        """Check against the layer's weights.

        Raises:
            ValueError: naming what is wrong.
        """
        if (self.hidden is None) != (weights.norm_feed_forward is None):
            raise ValueError(f"given[{index}].hidden must be there where the layer has a feed-forward network")
        if (self.window is None) != (weights.norm_attention is None):
            raise ValueError(f"given[{index}].window must be there where the layer has self-attention")
        if self.hidden is not None:
            size = (len(self.hidden[0]), weights.width)
            _check_pair(f"given[{index}].hidden", self.hidden, size, dtype)
        if self.window is not None and attention is not None:
            heads = attention.num_heads
            _check_pair(f"given[{index}].window", self.window, (window, heads, weights.width // heads), dtype)


@dataclass(frozen=True, slots=True)
class LayerMade:
    """What one layer made of n new events.

    Args:
        keys: [n, D].
        values: [n, D].
        window: The window with the new events behind, [w + n, H, K]; None without self-attention.
    """

    keys: Tensor
    values: Tensor
    window: tuple[Tensor, Tensor] | None


def check_weights(layers: Sequence[LayerWeights], attention: SelfAttention | None) -> None:
    """Check each layer, and that all are of one width.

    Raises:
        ValueError: there is no layer, or something does not fit.
    """
    if not layers:
        raise ValueError("weights must have at least one layer, have 0")
    for index, layer in enumerate(layers):
        layer.check(f"weights[{index}]")
        if layer.width != layers[0].width:
            raise ValueError(f"weights[{index}] must be of width {layers[0].width}, is of {layer.width}")
        if layer.norm_attention is not None and attention is None:
            raise ValueError(f"attention must be given: weights[{index}] has self-attention")
    if attention is not None:
        attention.check(layers[0].width)


def _check_pair(name: str, pair: tuple[Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x in pair:
        if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous():
            found = f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}"
            raise ValueError(f"{name} must be contiguous {dtype} {list(shape)} on the CPU, is {found}")
