"""Shared execution is per-pair execution: for every candidate, any micro-batch split, any mix of requests."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.config import EncoderConfig, GroupConfig, RankerConfig, TierConfig
from models.inputs import COUNTER_FEATURES
from models.layers.layout import CandidateLayout
from models.network import NUM_LEVELS, RankingNetwork, State
from models.random_request import random_requests
from models.sequence_encoder import Ages, Events

ROUNDINGS_PER_LAYER = 12
"""Times that a value is stored on its way through one interaction layer: queries, attention, products, norms, maps."""


@dataclass(frozen=True)
class Batch:
    """Candidates of several requests, and a network for them."""

    network: RankingNetwork
    features: Tensor
    events: Events
    ages: Ages
    dense: Tensor
    taste: Tensor
    pooled: Tensor
    counters: Tensor
    speculative: Tensor
    levels: Tensor
    owner: Tensor

    @classmethod
    def draw(cls, config: RankerConfig, num_requests: int, owner: list[int], seed: int, dtype: torch.dtype) -> Self:
        torch.manual_seed(seed)
        network = RankingNetwork(config).eval()
        for parameter in network.parameters():
            parameter.data += 0.3 * parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape)
        length, count = config.encoder.num_events, len(owner)
        mask = torch.arange(length) < torch.randint(0, length + 1, (num_requests, 1))
        features, events, ages, dense, taste = random_requests(config, batch=num_requests, mask=mask)
        levels = torch.randint(0, NUM_LEVELS, (count,))
        speculative = torch.randn(count, config.speculative_width) * (levels > 0)[:, None]
        return cls(
            network.to(dtype),
            features.to(dtype),
            events.to(dtype),
            ages,
            dense.to(dtype),
            taste.to(dtype),
            torch.randn(count, len(config.candidate_features), config.width).to(dtype),
            torch.randn(count, len(COUNTER_FEATURES)).to(dtype),
            speculative.to(dtype),
            levels,
            torch.tensor(owner, dtype=torch.int64),
        )

    def encode(self, requests: Tensor) -> State:
        events = Events(*(getattr(self.events, field.name)[requests] for field in fields(Events)))
        mask = self.ages.mask
        assert mask is not None
        ages = Ages(self.ages.log_gaps[requests], mask[requests])
        return self.network.encode(self.features[requests], events, ages, self.dense[requests], self.taste[requests])

    def shared(self, state: State, chosen: Tensor) -> list[Tensor]:
        """Return the logits of some candidates at every depth, the first pass first; float32."""
        return self._logits(state, chosen, self.owner[chosen], len(state["first"]))

    def per_pair(self, candidate: int) -> list[Tensor]:
        """Return the logits of one candidate, its request encoded for it alone."""
        owner = self.owner[candidate : candidate + 1]
        return self._logits(self.encode(owner), torch.tensor([candidate]), torch.zeros(1, dtype=torch.int64), 1)

    def _logits(self, state: State, chosen: Tensor, owner: Tensor, num_requests: int) -> list[Tensor]:
        layout = CandidateLayout.of(owner, num_requests)
        pooled, counters = self.pooled[chosen], self.counters[chosen]
        first = self.network.first_pass(state, pooled, counters, layout)
        exits, _ = self.network.all_depths(
            state, pooled, counters, self.speculative[chosen], self.levels[chosen], layout
        )
        return [first.float(), *(exits[depth].float() for depth in sorted(exits))]


def bound(config: RankerConfig, dtype: torch.dtype, scale: float) -> float:
    """Return how far two orders of the same sums may lie apart: float32 sums of the longest reduction, and one rounding
    to the storage type each time a value is kept, their errors adding up like independent ones."""
    sizes = config.layer_sizes
    longest = max(max(each.request.num_products, each.candidate.num_products) for each in sizes)
    longest = max(longest, config.encoder.num_tokens, *(e.feed_forward_width for e in sizes))
    summed = torch.finfo(torch.float32).eps * math.sqrt(longest * config.num_layers)
    stored = (
        0.0
        if dtype == torch.float32
        else torch.finfo(dtype).eps / 2 * math.sqrt(ROUNDINGS_PER_LAYER * config.num_layers)
    )
    return 4 * max(scale, 1.0) * (summed + stored)


groups = st.builds(
    GroupConfig,
    num_queries=st.integers(1, 3),
    num_mixtures=st.integers(1, 5),
    num_mlp_tokens=st.integers(1, 4),
    num_linear_tokens=st.integers(1, 4),
    hidden_width=st.integers(1, 19),
)


@st.composite
def configs(draw: st.DrawFn) -> RankerConfig:
    num_heads = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 4))
    num_events = draw(st.integers(1, 17))
    return RankerConfig(
        width=num_heads * 2 * draw(st.integers(2, 4)),
        history_length=num_events,
        num_layers=num_layers,
        num_dense_tokens=draw(st.integers(1, 3)),
        encoder=EncoderConfig(
            num_events=num_events,
            block=draw(st.integers(1, 6)),
            window_blocks=draw(st.integers(1, 3)),
            self_attention=draw(st.booleans()),
            comp_skip=draw(st.booleans()),
            num_seeds=draw(st.integers(1, 4)),
            num_summary_maps=draw(st.integers(1, 3)),
            num_context_tokens=draw(st.integers(1, 3)),
            num_summaries=draw(st.integers(1, 3)),
            num_heads=num_heads,
            feed_forward_width=draw(st.integers(1, 20)),
        ),
        request_group=draw(groups),
        candidate_group=draw(groups),
        request_ratio=draw(st.sampled_from([0.5, 1.0, 2.5])),
        head_width=draw(st.integers(1, 9)),
        first_pass_width=draw(st.integers(1, 9)),
        speculative_width=draw(st.integers(1, 9)),
        tiers={
            "light": TierConfig(head_max=0),
            "standard": TierConfig(head_max=9, num_layers=draw(st.integers(1, num_layers))),
            "full": TierConfig(head_max=9),
        },
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs(),
    num_requests=st.integers(1, 4),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 2**31 - 1),
)
def test_shared_execution_is_per_pair_execution(
    dtype: torch.dtype, config: RankerConfig, num_requests: int, owners: list[int], cuts: list[int], seed: int
) -> None:
    batch = Batch.draw(config, num_requests, [owner % num_requests for owner in owners], seed, dtype)
    with torch.inference_mode():
        state = batch.encode(torch.arange(num_requests))
        whole = batch.shared(state, torch.arange(len(owners)))
        pairs = [batch.per_pair(candidate) for candidate in range(len(owners))]
        edges = sorted({0, *(min(cut, len(owners)) for cut in cuts), len(owners)})
        parts = [batch.shared(state, torch.arange(a, b)) for a, b in itertools.pairwise(edges)]
    for index, expected in enumerate(whole):
        limit = bound(config, dtype, float(expected.abs().max()))
        alone = torch.cat([pair[index] for pair in pairs])
        split = torch.cat([part[index] for part in parts])
        assert np.isfinite(expected.numpy()).all()
        assert float((alone - expected).abs().max()) <= limit
        assert float((split - expected).abs().max()) <= limit


def test_a_candidate_of_another_request_is_another_answer() -> None:
    """Without this the property could hold because nothing depends on the request."""
    config = RankerConfig(width=16, history_length=8, encoder=EncoderConfig(num_events=8))
    batch = Batch.draw(config, 2, [0, 1], 0, torch.float32)
    batch.pooled[1], batch.counters[1] = batch.pooled[0], batch.counters[0]
    batch.speculative[1], batch.levels[1] = batch.speculative[0], batch.levels[0]
    with torch.inference_mode():
        for logits in batch.shared(batch.encode(torch.arange(2)), torch.arange(2)):
            assert float((logits[0] - logits[1]).abs().max()) > 1e-2
