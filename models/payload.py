"""How large the messages of a request are, from the configuration alone: what decides how a call travels.

Estimates, within a small factor: the bytes of a message also depend on how often its ids repeat. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from models.config import RankerConfig
from models.inputs import COUNTER_FEATURES

FLOAT_BYTES = 4
FEATURE_BYTES = 64
"""One candidate's keys, rows, offsets and counters; measured 62 with three features."""

CARRIED_BYTES = 24
"""Rows, positions and offsets of one feature that a candidate carries, with two ids."""


@dataclass(frozen=True, slots=True)
class PayloadSizes:
    """Sizes of the messages of one model.

    Args:
        candidate_bytes: The largest message that grows with the candidates (their table rows, their speculative
            embeddings), bytes a candidate.
        state_bytes: The user state of a full history, bytes.
        pair_bytes: One speculative embedding, bytes.
    """

    candidate_bytes: int
    state_bytes: int
    pair_bytes: int

    @classmethod
    def of(cls, config: RankerConfig) -> Self:
        """Return the sizes of a model with this configuration."""
        width, num_tokens = config.width, config.encoder.num_tokens
        layers = 0
        for sizes in config.layer_sizes:
            own = sizes.candidate
            tokens = 2 * num_tokens + own.num_queries + own.num_mixtures + own.num_linear_tokens
            layers += tokens * width + own.hidden_width
        first = config.num_objectives * (len(config.candidate_features) * width + len(COUNTER_FEATURES))
        return cls(
            candidate_bytes=max(
                FLOAT_BYTES * width * (1 + len(config.carried_features)),
                FLOAT_BYTES * config.speculative_width,
                FEATURE_BYTES + CARRIED_BYTES * len(config.carried_features),
            ),
            state_bytes=FLOAT_BYTES * (layers + first + sum(config.head_widths.values())),
            pair_bytes=FLOAT_BYTES * config.speculative_width,
        )
