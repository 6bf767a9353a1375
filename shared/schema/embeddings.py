"""Embedding rows of a shard and pooled embeddings of a request (embedding -> ranking)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.schema.stamp import Stamp


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """The distinct rows that one shard owns of what a request needs.

    Rows travel unpooled: pooling happens once, in the reader, in one order, so that any number of shards gives the
    same bits.

    Args:
        stamp: Provenance.
        shard: Shard index.
        rows: table -> float32 [U_s, D], rows of ``FeatureBatch.unique_rows[table]`` that this shard owns, same order.
    """

    stamp: Stamp
    shard: int
    rows: dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PooledEmbeddings:
    """One embedding a candidate and feature, pooled over the feature's ids.

    Args:
        features: Names of the F features, the order of axis 1.
        values: float32 [C, F, D]; a candidate with no id in a feature has the zero vector there.
        missing_shards: Shards whose rows were replaced by the out-of-vocabulary row.
    """

    features: tuple[str, ...]
    values: npt.NDArray[np.float32]
    missing_shards: tuple[int, ...]
