"""RankingNetwork: the dense half of the ranker, from embeddings to logits, split into a request and a candidate side.

``encode`` computes all that no candidate changes, once a request; ``first_pass`` and ``full_pass`` index into it. So
the cost of N candidates is ``N * candidate side + request side``. The candidate side may end after some layers, at an
exit with heads of its own: that is what a tier is. An exit's heads say by how much the first pass was wrong: its logits
are the first pass's plus their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import RankerConfig
from models.heads import FirstPass, Heads
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES
from models.kunlun import INIT_STD, EncoderLayer, Personal, Window
from models.layers.attention import attend
from models.layers.layout import CandidateLayout
from models.sequence_encoder import Ages, EncodedLayer, Events, SequenceEncoder
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

    def encode(self, features: Tensor, events: Events, ages: Ages, dense: Tensor, taste: Tensor) -> State:
        """Compute the request side of B requests.

        Args:
            features: [B, request features, D], embeddings.
            events: The histories.
            ages: How long ago their events are.
            dense: [B, dense features].
            taste: [B, D], the sum of the items of all events that are read, as events embed them, by taste weight.

        Returns:
            The user state; ``mask`` bool [B, T] is in it where the ages have one.
        """
        encoded = self.encode_events(features, events)
        return self.finish(features, [(own.keys, own.values) for own in encoded], ages, dense, taste)

    def encode_events(
        self,
        features: Tensor,
        events: Events,
        before: Sequence[Window] | None = None,
        num_before: int = 0,
        personal: Sequence[Personal] | None = None,
    ) -> list[EncodedLayer]:
        """Compute what the time of the request does not change: see ``SequenceEncoder``."""
        encoded: list[EncodedLayer] = self.encoder(features, events, before, num_before, personal)
        return encoded

    def finish(
        self, features: Tensor, encoded: Sequence[tuple[Tensor, Tensor]], ages: Ages, dense: Tensor, taste: Tensor
    ) -> State:
        """Compute what is left of the request side when the events are encoded.

        Args:
            features: [B, request features, D], the same that the events were encoded with.
            encoded: Each layer's keys and values of the events, both [B, L, D].
            ages: How long ago the events are.
            dense: [B, dense features].
            taste: [B, D].
        """
        made = self.dense(dense).view(len(dense), -1, self.config.width)
        tokens = torch.cat([features, made, taste[:, None]], dim=1).transpose(0, 1)
        seen = None if ages.mask is None else functional.pad(ages.mask, (1, 0), value=True)
        state: State = {} if seen is None else {"mask": seen}
        turn = self.encoder.from_now(ages)
        summaries = self.encoder.summaries.expand(len(dense), -1, -1)
        for index, module in enumerate(self.layers):
            interaction, layer = cast(InteractionLayer, module), self.encoder.layer(index)
            keys, values = layer.finish(*encoded[index], turn)
            answers, summaries = self._ask(layer, interaction.request_queries(tokens), summaries, (keys, values, seen))
            tokens, contributions = interaction.encode(tokens, answers, summaries, keys, values)
            state.update(contributions.named(index))
            if index + 1 in self.config.exits:
                state[f"head{index + 1}"] = self.heads.exit(index + 1).encode(tokens)
        state["first"] = self.first.encode(tokens)
        return state

    def _ask(
        self, layer: EncoderLayer, queries: Tensor, summaries: Tensor, history: tuple[Tensor, Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return what the request's queries found in a layer's history, and the summaries after that layer."""
        num_heads = self.config.encoder.num_heads
        if layer.summary is None:
            return attend(queries, *history, num_heads), summaries
        seeds = layer.summary.seeds
        both = torch.cat([seeds.expand(len(queries), *seeds.shape), queries], dim=1)
        answers = attend(both, *history, num_heads)
        return answers[:, len(seeds) :], summaries + layer.summary(answers[:, : len(seeds)])

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
        first: Tensor | None = None,
    ) -> Tensor:
        """Score C candidates with the first pass, the first layers of the network and the heads after them.

        Args:
            state: User state of B requests.
            pooled: [C, F, D].
            counters: [C, counter features].
            speculative: [C, E], zero where there is none; None: none for any candidate.
            levels: int64 [C], ``HitLevel``; None: ``NONE`` for all.
            layout: Which request each candidate belongs to.
            depth: Interaction layers to run, one of the model's exits; None: all.
            first: Logits [C, O] of ``first_pass`` where they are known; None: it runs first.

        Returns:
            Logits [C, O].

        Raises:
            KeyError: there is no exit of that depth.
        """
        depth = self.config.num_layers if depth is None else depth
        first = self.first_pass(state, pooled, counters, layout) if first is None else first
        tokens = self.candidate_tokens(pooled, counters, speculative, levels)
        return first + self._exit(state, tokens, layout, depth)[0]

    def all_depths(
        self,
        state: State,
        pooled: Tensor,
        counters: Tensor,
        speculative: Tensor | None,
        levels: Tensor | None,
        layout: CandidateLayout,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Score C candidates with the first pass and at every exit; arguments as in ``full_pass``.

        Returns:
            depth, 0 for the first pass -> logits [C, O], and each candidate's own speculative embedding [C, E].
        """
        first = self.first_pass(state, pooled, counters, layout)
        tokens = self.candidate_tokens(pooled, counters, speculative, levels)
        logits = {0: first}
        hidden = tokens
        for index in range(self.config.num_layers):
            tokens = self._layer(index, tokens, state, layout)
            if index + 1 in self.config.exits:
                head = self.heads.exit(index + 1)
                correction, hidden = head.rank(tokens, state[f"head{index + 1}"], layout)
                logits[index + 1] = first + correction
        return logits, self.heads.embed(hidden)

    def embed(self, state: State, pooled: Tensor, counters: Tensor, layout: CandidateLayout) -> Tensor:
        """Return the speculative embeddings [C, E] of candidates that have none yet; arguments as in ``full_pass``."""
        tokens = self.candidate_tokens(pooled, counters, None, None)
        return self.heads.embed(self._exit(state, tokens, layout, self.config.num_layers)[1])

    def candidate_parameters(self) -> list[nn.Parameter]:
        """Return the maps that the exits alone need: the candidates' of every layer, and the heads of the exits."""
        named = [each for layer in self.layers for each in layer.named_parameters()]
        theirs = [parameter for name, parameter in named if not name.startswith("request.")]
        return [*theirs, *self.heads.exits.parameters()]

    def _exit(self, state: State, tokens: Tensor, layout: CandidateLayout, depth: int) -> tuple[Tensor, Tensor]:
        """Run the layers before an exit and its heads: their logits [C, O] and the hidden layer [C, hidden]."""
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
