"""Table schemes of equal bytes: from a sample's ids to rows of one matrix.

Shape letters: N rows of samples, F features, L rows that a sample reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.embedding.movielens_ids import FEATURES, IdSamples
from models.embedding.allocate import Demand, allocate, proportional
from models.embedding.unified import UnifiedConfig, UnifiedRows
from shared.hashing import hash64, mix_keys

WIDTH = 30
"""Width of a feature's embedding: 13,177 ids of 30 floats are the paper's 1.6 MB."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to lay features into one matrix.

    Args:
        rows: int64 [N, L], rows that each sample reads.
        num_rows: Rows of the matrix.
        width: Width of a row; ``L * width`` is the same for all schemes.
    """

    rows: npt.NDArray[np.int64]
    num_rows: int
    width: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the matrix."""
        return self.num_rows * self.width * 4


def collisionless(samples: IdSamples) -> Scheme:
    """Give every id a row of its own."""
    bases = np.cumsum((0, *samples.num_ids[:-1]))
    return Scheme(samples.ids + bases, sum(samples.num_ids), WIDTH)


def separate(samples: IdSamples, num_rows: dict[str, int]) -> Scheme:
    """Hash every feature into a table of its own.

    Args:
        samples: Ids.
        num_rows: feature -> rows of its table.
    """
    sizes = [num_rows[feature] for feature in FEATURES]
    rows = np.empty_like(samples.ids)
    for index, base in enumerate(np.cumsum((0, *sizes[:-1]))):
        hashed = mix_keys(samples.ids[:, index], hash64(FEATURES[index].encode())) % np.uint64(sizes[index])
        rows[:, index] = hashed.astype(np.int64) + base
    return Scheme(rows, sum(sizes), WIDTH)


def multiplexed(samples: IdSamples, budget: float, num_chunks: int) -> Scheme:
    """Let all features share one table, each with the same number of chunks.

    Args:
        samples: Ids.
        budget: Bytes as a share of those of the collisionless tables.
        num_chunks: Chunks of a feature; must divide ``WIDTH``.
    """
    num_rows = int(sum(samples.num_ids) * budget) * num_chunks
    config = UnifiedConfig(num_rows=num_rows, width=WIDTH // num_chunks, chunks=dict.fromkeys(FEATURES, num_chunks))
    unified = UnifiedRows(config)
    rows = [unified.rows(feature, samples.ids[:, index]) for index, feature in enumerate(FEATURES)]
    return Scheme(np.concatenate(rows, axis=1), num_rows, config.width)


def sizes(samples: IdSamples, budget: float, weights: Sequence[float] | None) -> dict[str, int]:
    """Return the rows of separate tables.

    Args:
        samples: Ids; traffic is that of the training rows.
        budget: Bytes as a share of those of the collisionless tables.
        weights: Importance of each feature for the allocator; None: in proportion to the number of ids.
    """
    row_bytes = 4 * WIDTH
    budget_bytes = int(sum(samples.num_ids) * budget) * row_bytes
    demands = []
    for index, feature in enumerate(FEATURES):
        counts = np.bincount(samples.ids[samples.train, index], minlength=samples.num_ids[index])
        # An id that only valid or test rows have needs a row as well: it counts as read once.
        demands.append(Demand.of(feature, np.maximum(counts, 1), row_bytes, 1.0 if weights is None else weights[index]))
    return proportional(demands, budget_bytes) if weights is None else allocate(demands, budget_bytes)
