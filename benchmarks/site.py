"""A mesh to measure or verify: where it is, what it ranks with, which data it was made from."""

from __future__ import annotations

from dataclasses import dataclass

from models.source import WeightSource
from training.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class Site:
    """A running mesh.

    Args:
        url: Base URL.
        config_hash: Digest of its resolved configuration, or ``unknown`` for a mesh that was started elsewhere.
        dataset: Data that its weights were trained on and its user log holds.
        source: Its weights.
        default_limit: Returned candidates when a request names no limit.
        precompute_max: Candidates of one answer that are followed up.
        vector_dtype: How speculative embeddings are stored.
    """

    url: str
    config_hash: str
    dataset: Dataset
    source: WeightSource
    default_limit: int = 100
    precompute_max: int = 128
    vector_dtype: str = "float32"

    @property
    def history_length(self) -> int:
        """L of the model."""
        return int(self.source.json("model")["history_length"])
