"""Requests with their histories, and candidates, drawn at random: what networks are timed and probed with."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from models.config import RankerConfig
from models.inputs import BEGINNING_BUCKET, COUNTER_FEATURES, DENSE_FEATURES, NUM_WEIGHT_BUCKETS
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork, State
from models.sequence_encoder import Ages, Events

RequestSide: TypeAlias = tuple[Tensor, Events, Ages, Tensor, Tensor]
"""The arguments of ``RankingNetwork.encode``."""


def random_requests(
    config: RankerConfig,
    generator: torch.Generator | None = None,
    batch: int = 1,
    mask: Tensor | None = None,
    length: int | None = None,
) -> RequestSide:
    """Return B random requests: pauses of seconds to months between events.

    Args:
        config: The ranker's configuration.
        generator: Source of randomness; None: torch's own.
        batch: B.
        mask: bool [B, L], true where there is an event; None: everywhere.
        length: L; None: as many events as the model reads.
    """
    length = config.encoder.num_events if length is None else length
    pauses = torch.rand(batch, length, generator=generator, dtype=torch.float64) * 15
    events = Events(
        torch.randn(batch, length, config.width, generator=generator),
        torch.randint(0, NUM_WEIGHT_BUCKETS, (batch, length), generator=generator),
        torch.randint(0, BEGINNING_BUCKET + 1, (batch, length), generator=generator),
        pauses.cumsum(1),
    )
    gaps = pauses.exp().flip(1).cumsum(1).flip(1)
    return (
        torch.randn(batch, len(config.request_features), config.width, generator=generator),
        events,
        Ages(gaps.log1p(), mask),
        torch.randn(batch, len(DENSE_FEATURES), generator=generator),
        torch.randn(batch, config.width, generator=generator),
    )


def random_state(network: RankingNetwork, generator: torch.Generator) -> State:
    """Encode one random request with a full history."""
    return network.encode(*random_requests(network.config, generator))


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
