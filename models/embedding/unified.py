"""Unified (multiplexed) embedding: a few shared tables that every feature reads by hash, chunk by chunk.

A feature with c chunks reads c rows of width d and concatenates them. Row of a chunk: the id's hash with a salt of
feature and chunk, modulo the rows that hold hashed ids. Features collide with one another, which costs little: the
first layer has weights of its own for each feature and turns such collisions into orthogonal directions. What costs is
two ids of one feature in one row, and those meet less often in one large table than in a slice of it.

All tables lie in one matrix, table after table. Row 0 of each is the out-of-vocabulary row: a feature with a vocabulary
sends unknown ids there and counts them; a feature without one hashes whatever comes.

Shape letters: N ids, C chunks of a feature, D width of a chunk, R rows of all tables.

Source: Coleman et al., Unified Embedding: Battle-Tested Feature Representations for Web-Scale ML Systems,
arXiv 2305.12102; chunks are dealt round the tables as TensorFlow Recommenders does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from models.embedding.vocabulary import OOV_ROW, Vocabulary
from shared.config import Config
from shared.hashing import hash64, mix_keys

RowIds: TypeAlias = npt.NDArray[np.int64]

INIT_BOUND = 0.05
"""Rows start uniform in +-0.05, as in the paper."""


class UnifiedConfig(Config):
    """Shared tables and who reads them.

    Args:
        num_rows: Rows of each table, row 0 included.
        width: D, width of a row.
        num_tables: Tables; chunks are dealt round them.
        chunks: feature -> C, rows that make its embedding of width ``C * width``.
    """

    num_rows: int = Field(ge=2, lt=2**40)
    width: int = Field(ge=1)
    num_tables: int = Field(1, ge=1)
    chunks: dict[str, int] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bad := {name: count for name, count in self.chunks.items() if count < 1}:
            raise ValueError(f"chunks must be at least 1 a feature, are {bad}")
        return self

    @property
    def num_rows_total(self) -> int:
        """R, rows of the matrix that holds all tables."""
        return self.num_rows * self.num_tables

    def feature_width(self, feature: str) -> int:
        """Return the width of one feature's embedding."""
        return self.chunks[feature] * self.width


class UnifiedRows:
    """Maps ids of every feature to rows of the matrix.

    Args:
        config: Tables and features.
        vocabularies: feature -> the ids that have been seen in training; features without one hash every id.

    Raises:
        ValueError: a vocabulary belongs to no feature.
    """

    def __init__(self, config: UnifiedConfig, vocabularies: Mapping[str, Vocabulary] | None = None) -> None:
        self.config = config
        self._vocabularies = dict(vocabularies or {})
        if unknown := sorted(set(self._vocabularies) - set(config.chunks)):
            raise ValueError(f"vocabularies must be of features {sorted(config.chunks)}, has {unknown}")
        self.num_oov: dict[str, int] = dict.fromkeys(config.chunks, 0)
        """feature -> ids seen since the start that its vocabulary does not hold."""
        self._salts: dict[str, tuple[int, ...]] = {}
        self._bases: dict[str, RowIds] = {}
        dealt = 0
        for feature, count in config.chunks.items():
            # By name, not by position: a feature that comes or goes leaves the rows of the others where they are.
            self._salts[feature] = tuple(hash64(feature.encode(), salt=chunk) for chunk in range(count))
            self._bases[feature] = (np.arange(dealt, dealt + count, dtype=np.int64) % config.num_tables) * (
                config.num_rows
            )
            dealt += count

    def rows(self, feature: str, keys: npt.NDArray[np.int64]) -> RowIds:
        """Return the rows of ids, and count those out of vocabulary.

        Args:
            feature: Feature name.
            keys: int64 [N], id keys (``shared.hashing``).

        Returns:
            int64 [N, C], rows of the matrix.

        Raises:
            KeyError: there is no feature of that name.
        """
        buckets = np.uint64(self.config.num_rows - 1)
        rows = np.empty((len(keys), self.config.chunks[feature]), np.int64)
        for chunk, salt in enumerate(self._salts[feature]):
            rows[:, chunk] = (mix_keys(keys, salt) % buckets).astype(np.int64) + 1
        if feature in self._vocabularies:
            unknown = self._vocabularies[feature].rows(keys) == OOV_ROW
            rows[unknown] = OOV_ROW
            self.num_oov[feature] += int(unknown.sum())
        return rows + self._bases[feature]


class UnifiedTable(nn.Module):
    """The matrix as a parameter, for training.

    Args:
        config: Tables and features.
        generator: Of the initial rows; None: torch's own.
    """

    def __init__(self, config: UnifiedConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        weight = torch.empty(config.num_rows_total, config.width)
        self.weight = nn.Parameter(weight.uniform_(-INIT_BOUND, INIT_BOUND, generator=generator))

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings: int64 [.., C] rows of any features -> float32 [.., C * D]."""
        return functional.embedding(rows, self.weight).flatten(-2)


class UnifiedLookup:
    """The same look-up in plain numpy, for serving.

    Args:
        rows: Maps ids to rows.
        weight: float32 [R, D].

    Raises:
        ValueError: the matrix has another shape than the configuration says.
    """

    def __init__(self, rows: UnifiedRows, weight: npt.NDArray[np.float32]) -> None:
        expected = (rows.config.num_rows_total, rows.config.width)
        if weight.shape != expected:
            raise ValueError(f"weight of a unified table must be {expected}, is {weight.shape}")
        self.rows = rows
        self._weight = weight

    def lookup(self, feature: str, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return embeddings of one feature: int64 [N] id keys -> float32 [N, C * D]."""
        rows = self._weight[self.rows.rows(feature, keys)]
        return rows.reshape(len(keys), self.rows.config.feature_width(feature))
