"""One request with a full history and its candidates, drawn at random: what networks are timed and probed with."""

from __future__ import annotations

import torch
from torch import Tensor

from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES, DENSE_FEATURES, NUM_GAP_BUCKETS, NUM_WEIGHT_BUCKETS
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State


def random_state(network: RankingNetwork, generator: torch.Generator) -> State:
    """Encode one request whose embeddings, buckets and dense features are random."""
    config = network.config
    length, width = config.encoder.num_events, config.width
    return network.encode(
        torch.randn(1, len(config.request_features), width, generator=generator),
        torch.randn(1, length, width, generator=generator),
        torch.randint(NUM_WEIGHT_BUCKETS, (1, length), generator=generator),
        torch.randint(NUM_GAP_BUCKETS, (1, length), generator=generator),
        None,
        torch.randn(1, len(DENSE_FEATURES), generator=generator),
    )


def random_candidates(
    config: RankerConfig, number: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, CandidateLayout]:
    """Draw C candidates of one request.

    Returns:
        Pooled embeddings [C, F, D], counters [C, counter features], and the layout.
    """
    pooled = torch.randn(number, len(config.candidate_features), config.width, generator=generator)
    counters = torch.randn(number, len(COUNTER_FEATURES), generator=generator)
    return pooled, counters, CandidateLayout.single(number)
