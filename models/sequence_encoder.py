"""The history encoder: request-only, one transformer layer for each interaction layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.inputs import NUM_GAP_BUCKETS, NUM_WEIGHT_BUCKETS
from models.layers.norm import RMSNorm

INIT_STD = 0.05


class EventEmbedding(nn.Module):
    """Embeds events: the item, what it was worth, how long before the request, and its rank from the newest.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.num_positions = config.encoder.position_buckets
        num_buckets = NUM_WEIGHT_BUCKETS + NUM_GAP_BUCKETS + self.num_positions
        self.buckets = nn.Parameter(torch.randn(num_buckets, config.width) * INIT_STD)
        self.gains = nn.Parameter(torch.ones(NUM_WEIGHT_BUCKETS, config.width))

    def forward(self, items: Tensor, weight_buckets: Tensor, gap_buckets: Tensor) -> Tensor:
        """Embed B padded histories.

        Args:
            items: [B, L, D], the items' embeddings, the newest event last.
            weight_buckets: int64 [B, L].
            gap_buckets: int64 [B, L].

        Returns:
            [B, L, D].
        """
        ids = [weight_buckets, gap_buckets + NUM_WEIGHT_BUCKETS]
        if self.num_positions:
            ranks = torch.arange(items.shape[1] - 1, -1, -1, device=items.device).clamp(max=self.num_positions - 1)
            ids.append((ranks + (NUM_WEIGHT_BUCKETS + NUM_GAP_BUCKETS)).expand_as(gap_buckets))
        bags = torch.stack(ids, dim=-1).view(-1, len(ids))
        items = items * functional.embedding(weight_buckets, self.gains)
        return items + functional.embedding_bag(bags, self.buckets, mode="sum").view(items.shape)


class EncoderLayer(nn.Module):
    """Attention and a position-wise network, normalised before each.

    Keys and values of the encoded tokens are made once and read three times: by the summaries, and by the request and
    the candidate queries of the interaction layer.

    Args:
        config: The ranker's configuration.
        hidden: Hidden width of the position-wise network.
    """

    def __init__(self, config: RankerConfig, hidden: int) -> None:
        super().__init__()
        width, bias = config.width, config.bias
        self.num_summaries = config.encoder.num_summaries
        self.norm_feed_forward = RMSNorm(width, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.norm_out = RMSNorm(width, bias=bias)
        self.key_value = nn.Linear(width, 2 * width, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)

    def transform(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the position-wise network and make what attention needs.

        Args:
            tokens: [B, T, D], summaries first.

        Returns:
            Tokens [B, T, D], the summaries' queries [B, summaries, D], keys and values [B, T, D].
        """
        tokens = tokens + self.down(functional.relu(self.up(self.norm_feed_forward(tokens))))
        seen = self.norm_out(tokens)
        keys, values = self.key_value(seen).chunk(2, dim=-1)
        return tokens, self.query(seen[:, : self.num_summaries]), keys, values

    def close(self, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Add what the summaries' queries found, [B, summaries, D]: returns all tokens, and the summaries alone."""
        summaries = tokens[:, : self.num_summaries] + self.attention_out(answers)
        return torch.cat([summaries, tokens[:, self.num_summaries :]], dim=1), summaries


class SequenceEncoder(nn.Module):
    """Event embedding, learned summary tokens in front, and the layers.

    Args:
        config: The ranker's configuration.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.events = EventEmbedding(config)
        self.summaries = nn.Parameter(torch.randn(config.encoder.num_summaries, config.width) * INIT_STD)
        self.layers = nn.ModuleList(EncoderLayer(config, sizes.feed_forward_width) for sizes in config.layer_sizes)

    def embed(
        self, items: Tensor, weight_buckets: Tensor, gap_buckets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that enter the first layer, and the mask that goes with them.

        Args:
            items: [B, L, D].
            weight_buckets: int64 [B, L].
            gap_buckets: int64 [B, L].
            mask: bool [B, L], the newest event last; None: every position holds an event.

        Returns:
            Tokens [B, T, D] with T = summaries + L, and bool [B, T] or None.
        """
        events = self.events(items, weight_buckets, gap_buckets)
        summaries = self.summaries.expand(len(items), *self.summaries.shape)
        tokens = torch.cat([summaries, events], dim=1)
        if mask is None:
            return tokens, None
        return tokens, functional.pad(mask, (self.summaries.shape[0], 0), value=True)
