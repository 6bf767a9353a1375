"""RankingNetwork: the dense half of the ranker, from embeddings to logits, split into a request and a candidate side.

``encode`` computes all that no candidate changes, once a request; ``first_pass`` and ``full_pass`` index into it. So
the cost of N candidates is ``N * candidate side + request side``. The candidate side may end after some layers, at an
exit with heads of its own: that is what a tier is.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.heads import FirstPass, Heads
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES
from models.layers.attention import attend
from models.layers.layout import CandidateLayout
from models.sequence_encoder import INIT_STD, EncoderLayer, SequenceEncoder
from models.wukong import Contributions, InteractionLayer
from shared.schema.speculative import HitLevel

State = dict[str, Tensor]
"""User state of B requests: name -> [B, ..]."""

NUM_LEVELS = int(max(HitLevel)) + 1


class RankingNetwork(nn.Module):
    """The dense network.

    Args:
        config: Sizes.
    """

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.dense = nn.Sequential(
            nn.Linear(len(DENSE_FEATURES), config.dense_hidden_width, bias=config.bias),
            nn.ReLU(),
            nn.Linear(config.dense_hidden_width, config.num_dense_tokens * width, bias=config.bias),
        )
        self.encoder = SequenceEncoder(config)
        self.counters = nn.Sequential(
            nn.Linear(len(COUNTER_FEATURES), config.dense_hidden_width, bias=config.bias),
            nn.ReLU(),
            nn.Linear(config.dense_hidden_width, width, bias=config.bias),
        )
        self.speculative = nn.Linear(config.speculative_width, width, bias=False)
        self.presence = nn.Parameter(torch.randn(NUM_LEVELS, width) * INIT_STD)
        self.layers = nn.ModuleList(InteractionLayer(config, sizes) for sizes in config.layer_sizes)
        self.first = FirstPass(config)
        self.heads = Heads(config)

    def encode(
        self,
        features: Tensor,
        items: Tensor,
        weight_buckets: Tensor,
        gap_buckets: Tensor,
        mask: Tensor | None,
        dense: Tensor,
    ) -> State:
        """Compute the request side of B requests.

        Args:
            features: [B, request features, D], embeddings.
            items: [B, L, D], embeddings of the history's items, the newest last.
            weight_buckets: int64 [B, L].
            gap_buckets: int64 [B, L].
            mask: bool [B, L], true where there is an event; None: everywhere.
            dense: [B, dense features].

        Returns:
            The user state; ``mask`` bool [B, T] is in it where one was given.
        """
        history, seen = self.encoder.embed(items, weight_buckets, gap_buckets, mask)
        made = self.dense(dense).view(len(dense), -1, self.config.width)
        tokens = torch.cat([features, made], dim=1).transpose(0, 1)
        state: State = {} if seen is None else {"mask": seen}
        for index, module in enumerate(self.layers):
            interaction, layer = cast(InteractionLayer, module), cast(EncoderLayer, self.encoder.layers[index])
            history, queries, keys, values = layer.transform(history)
            num_summaries = queries.shape[1]
            queries = torch.cat([queries, interaction.request_queries(tokens)], dim=1)
            answers = attend(queries, keys, values, seen, self.config.encoder.num_heads)
            history, summaries = layer.close(history, answers[:, :num_summaries])
            tokens, contributions = interaction.encode(tokens, answers[:, num_summaries:], summaries, keys, values)
            state.update(contributions.named(index))
            if index + 1 in self.config.exits:
                state[f"head{index + 1}"] = self.heads.exit(index + 1).encode(tokens)
        state["first"] = self.first.encode(tokens)
        return state

    def first_pass(self, state: State, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Score C candidates cheaply: pooled [C, F, D], counters [C, counters] -> logits [C, O]."""
        return self.first.rank(state["first"], pooled, counters, layout)

    def full_pass(
        self,
        state: State,
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
        depth: int | None = None,
    ) -> Tensor:
        """Score C candidates with the first layers of the network and the heads after them.

        Args:
            state: User state of B requests.
            pooled: [C, F, D].
            counters: [C, counter features].
            speculative: [C, E], zero where there is none; None: none for any candidate.
            levels: int64 [C], ``HitLevel``; None: ``NONE`` for all.
            layout: Which request each candidate belongs to.
            depth: Interaction layers to run, one of the model's exits; None: all.

        Returns:
            Logits [C, O].

        Raises:
            KeyError: there is no exit of that depth.
        """
        depth = self.config.num_layers if depth is None else depth
        return self._exit(state, self.candidate_tokens(pooled, counters, speculative, levels), layout, depth)[0]

    def all_exits(
        self,
        state: State,
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Score C candidates at every exit in one pass; arguments as in ``full_pass``.

        Returns:
            depth -> logits [C, O], and each candidate's own speculative embedding [C, E].
        """
        tokens = self.candidate_tokens(pooled, counters, speculative, levels)
        logits: dict[int, Tensor] = {}
        hidden = tokens
        for index in range(self.config.num_layers):
            tokens = self._layer(index, tokens, state, layout)
            if index + 1 in self.config.exits:
                head = self.heads.exit(index + 1)
                logits[index + 1], hidden = head.rank(tokens, state[f"head{index + 1}"], layout)
        return logits, self.heads.embed(hidden)

    def embed(self, state: State, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Return the speculative embeddings [C, E] of candidates that have none yet; arguments as in ``full_pass``."""
        tokens = self.candidate_tokens(pooled, counters, None, None)
        return self.heads.embed(self._exit(state, tokens, layout, self.config.num_layers)[1])

    def _exit(self, state: State, tokens: Tensor, layout: CandidateLayout, depth: int) -> tuple[Tensor, Tensor]:
        """Run the layers before an exit and its heads: logits [C, O] and the hidden layer [C, hidden]."""
        for index in range(depth):
            tokens = self._layer(index, tokens, state, layout)
        return self.heads.exit(depth).rank(tokens, state[f"head{depth}"], layout)

    def candidate_tokens(
        self, pooled: Tensor, counters: Tensor, speculative: Tensor | None, levels: Tensor | None
    ) -> Tensor:
        """Return the tokens [candidate inputs, C, D] that enter the first layer; arguments as in ``full_pass``."""
        if speculative is None or levels is None:
            extra = self.presence[int(HitLevel.NONE)].expand(len(pooled), -1)
        else:
            extra = self.speculative(speculative) + functional.embedding(levels, self.presence)
        return torch.cat([pooled.transpose(0, 1), self.counters(counters)[None], extra[None]])

    def _layer(self, index: int, tokens: Tensor, state: State, layout: CandidateLayout) -> Tensor:
        layer = cast(InteractionLayer, self.layers[index])
        return layer.rank(tokens, Contributions.of(state, index), state.get("mask"), layout)
