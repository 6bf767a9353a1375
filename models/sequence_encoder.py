"""The history encoder: request-only, one layer for each interaction layer, extendable by new events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.inputs import BEGINNING_BUCKET, NUM_WEIGHT_BUCKETS
from models.kunlun import INIT_STD, EncoderLayer, Personal, Window
from models.layers.rotary import turns


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
        self.layers = nn.ModuleList(
            EncoderLayer(config, index, sizes.feed_forward_width) for index, sizes in enumerate(config.layer_sizes)
        )

    def layer(self, index: int) -> EncoderLayer:
        """Return one layer."""
        return cast(EncoderLayer, self.layers[index])

    def use_native(self) -> None:
        """Encode whole histories with the native kernel from now on; for networks in bfloat16."""
        for index in range(len(self.layers)):
            self.layer(index).is_native = True

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
        turn = None
        if any(self.config.parts(index).self_attention for index in range(len(self.layers))):
            positions = torch.arange(num_before, num_before + events.clock.shape[1], dtype=torch.float64)
            # For queries and keys side by side.
            turn = turns(positions.expand_as(events.clock), events.clock, self.head_width, 2 * self.config.num_heads)
        tokens = self.events(events)
        encoded = []
        for index in range(len(self.layers)):
            own = None if before is None else before[index]
            weights = self.layer(index).personal(context) if personal is None else personal[index]
            tokens, keys, values, window = self.layer(index)(tokens, weights, turn, own)
            encoded.append(EncodedLayer(keys, values, window, weights))
        return encoded

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
