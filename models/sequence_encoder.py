"""The history encoder: request-only, one layer for each interaction layer, extendable by new events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import event_layer
from models.config import RankerConfig
from models.inputs import BEGINNING_BUCKET, NUM_WEIGHT_BUCKETS
from models.kunlun import INIT_STD, EncoderLayer, Personal, Window
from models.layers.rotary import frequencies, turns
from shared.errors import ConfigError

FUSED_EVENTS_MAX = 128
"""Most events of one user that a native encoder takes through all layers in one call. More of them, as a long history
has when it is encoded anew, are better off with the kernel for whole blocks."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events of B histories, oldest first, padded behind; nothing of them changes with the time of the request.

    Args:
        items: [B, L, D], the items' embeddings.
        weight_buckets: int64 [B, L].
        pause_buckets: int64 [B, L].
        clock: float64 [B, L], log time between events, summed.
    """

    items: Tensor
    weight_buckets: Tensor
    pause_buckets: Tensor
    clock: Tensor

    def to(self, dtype: torch.dtype) -> Events:
        """Return them with embeddings of another type."""
        return replace(self, items=self.items.to(dtype))


@dataclass(frozen=True, slots=True)
class Ages:
    """How long ago the events of B histories are, seen from the request.

    Args:
        log_gaps: float64 [B, L], log(1 + seconds).
        mask: bool [B, L], true where there is an event; None: every position holds one.
    """

    log_gaps: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class EncodedLayer:
    """What one layer made of the events of B histories; no part of it depends on the request's time.

    Args:
        keys: [B, L, D].
        values: [B, L, D].
        window: What later events see of them in self-attention.
        personal: Weights that the request's features made; later events of the same features take them as they are.
    """

    keys: Tensor
    values: Tensor
    window: Window
    personal: Personal


class EventEmbedding(nn.Module):
    """Embeds events: the item, what it was worth, how long after the event before.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        num_buckets = NUM_WEIGHT_BUCKETS + BEGINNING_BUCKET + 1
        self.buckets = nn.Parameter(torch.randn(num_buckets, config.width) * INIT_STD)
        self.gains = nn.Parameter(torch.ones(NUM_WEIGHT_BUCKETS, config.width))

    def forward(self, events: Events) -> Tensor:
        """Embed B padded histories: [B, L, D]."""
        ids = torch.stack([events.weight_buckets, events.pause_buckets + NUM_WEIGHT_BUCKETS], dim=-1)
        items = events.items * functional.embedding(events.weight_buckets, self.gains)
        return items + functional.embedding_bag(ids.view(-1, 2), self.buckets, mode="sum").view(items.shape)


class SequenceEncoder(nn.Module):
    """Event embedding and the layers.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.config = config.encoder
        self.head_width = config.width // config.encoder.num_heads
        self.events = EventEmbedding(config)
        self.summaries = nn.Parameter(torch.randn(config.encoder.num_summaries, config.width) * INIT_STD)
        self._has_bias = config.bias
        self._fused: event_layer.PackedLayers | None = None
        self.layers = nn.ModuleList(
            EncoderLayer(config, index, sizes.feed_forward_width) for index, sizes in enumerate(config.layer_sizes)
        )

    def layer(self, index: int) -> EncoderLayer:
        """Return one layer."""
        return cast(EncoderLayer, self.layers[index])

    def use_native(self) -> None:
        """Encode with native kernels from now on; for networks in bfloat16.

        Weights are packed here: later changes do not reach events that go through all layers in one call (``fuses``).

        Raises:
            ConfigError: the network has biases.
        """
        if self._has_bias:
            raise ConfigError("an encoder with biases has no native form", field="bias", value=True)
        layers = [self.layer(index) for index in range(len(self.layers))]
        attention = None
        if any(layer.norm_attention is not None for layer in layers):
            sizes = (self.config.num_heads, self.config.block, self.config.window_blocks)
            attention = event_layer.SelfAttention(*sizes, *frequencies(self.head_width))
        self._fused = event_layer.pack([layer.weights() for layer in layers], attention, backend="native")
        for layer in layers:
            layer.is_native = True

    def fuses(self, batch: int, num_events: int) -> bool:
        """Whether so many events of so many histories go through all layers in one native call, not layer by layer."""
        return self._fused is not None and batch == 1 and 0 < num_events <= FUSED_EVENTS_MAX

    def forward(
        self,
        context: Tensor,
        events: Events,
        before: Sequence[Window] | None = None,
        num_before: int = 0,
        personal: Sequence[Personal] | None = None,
    ) -> list[EncodedLayer]:
        """Encode events, all of B histories or those that follow earlier ones.

        Args:
            context: [B, features, D], the request's features.
            events: The events.
            before: Each layer's window of the earlier events: of the open block, and of the whole blocks before it that
                an event sees; None: there are no earlier ones.
            num_before: Earlier events.
            personal: Each layer's weights as the same context made them before; None: made here.

        Returns:
            One a layer.
        """
        tokens = self.events(events)
        if personal is None:
            personal = [self.layer(index).personal(context) for index in range(len(self.layers))]
        if self._fused is not None and self.fuses(len(tokens), tokens.shape[1]):
            return self._encode_fused(self._fused, tokens[0], events.clock[0], before, num_before, personal)
        turn = None
        if any(self.config.parts(index).self_attention for index in range(len(self.layers))):
            positions = torch.arange(num_before, num_before + events.clock.shape[1], dtype=torch.float64)
            # For queries and keys side by side.
            turn = turns(positions.expand_as(events.clock), events.clock, self.head_width, 2 * self.config.num_heads)
        encoded = []
        for index, weights in enumerate(personal):
            own = None if before is None else before[index]
            tokens, keys, values, window = self.layer(index)(tokens, weights, turn, own)
            encoded.append(EncodedLayer(keys, values, window, weights))
        return encoded

    def _encode_fused(
        self,
        layers: event_layer.PackedLayers,
        tokens: Tensor,
        clock: Tensor,
        before: Sequence[Window] | None,
        num_before: int,
        personal: Sequence[Personal],
    ) -> list[EncodedLayer]:
        """Encode a few events of one history, [L, D], in one call."""
        none = tokens.new_empty(0, self.config.num_heads, self.head_width)
        given = []
        for index, weights in enumerate(personal):
            window: Window = None
            if self.config.parts(index).self_attention:
                window = None if before is None else before[index]
                window = (none, none) if window is None else (window[0][0].contiguous(), window[1][0].contiguous())
            given.append(event_layer.LayerGiven(weights if weights is None else (weights[0][0], weights[1][0]), window))
        made = event_layer.append(layers, tokens, clock, num_before, given)
        return [
            EncodedLayer(
                own.keys[None],
                own.values[None],
                None if own.window is None else (own.window[0][None], own.window[1][None]),
                weights,
            )
            for own, weights in zip(made, personal, strict=True)
        ]

    def from_now(self, ages: Ages) -> Tensor:
        """Return by how much keys are turned at the time of the request: by rank from the newest, and by log time.

        Returns:
            complex64 [B, L, D / 2].
        """
        log_gaps, mask = ages.log_gaps, ages.mask
        length = log_gaps.shape[1]
        places = torch.arange(length, dtype=torch.float64)
        newest = length - 1.0 if mask is None else mask.sum(1, keepdim=True) - 1.0
        return turns((places - newest).expand_as(log_gaps), -log_gaps, self.head_width, self.config.num_heads)
