"""Speculative embeddings: what the foundation workers computed before it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from shared.hashing import EntityId
from shared.schema.stamp import Stamp


class HitLevel(IntEnum):
    """Where a speculative embedding came from, best last."""

    NONE = 0
    USER_AGGREGATE = 2
    EXACT = 3

    @property
    def label(self) -> str:
        """Name used in responses and metrics."""
        return {0: "none", 2: "user", 3: "exact"}[int(self)]


@dataclass(frozen=True, slots=True)
class SpeculativeTask:
    """Whose embeddings are looked up or filled.

    Args:
        request_id: The request.
        version: Weights version; embeddings of another version are never read.
        user: Raw user id.
        as_of_s: Request time, seconds since the epoch; embeddings made for a later time are not used.
        remaining_ms: Budget left when the call was made.
    """

    request_id: str
    version: str
    user: EntityId
    as_of_s: int
    remaining_ms: float


@dataclass(frozen=True, slots=True)
class SpeculativeEmbeddings:
    """One (possibly absent) foundation embedding a candidate.

    Args:
        stamp: Provenance.
        vectors: float32 [C, E], zero where the level is NONE.
        levels: int8 [C], ``HitLevel`` of each candidate (the presence flag).
    """

    stamp: Stamp
    vectors: npt.NDArray[np.float32]
    levels: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class SpeculativeEmbedding:
    """One stored embedding of a (user, candidate) pair.

    Args:
        key: Candidate id key.
        group_key: The candidate's ad group.
        vector: float32 [E].
        as_of_s: Request time for which it was computed.
    """

    key: int
    group_key: int
    vector: npt.NDArray[np.float32]
    as_of_s: int


@dataclass(frozen=True, slots=True)
class PrecomputedBatch:
    """What a foundation worker computed for the head of one request.

    Args:
        stamp: Provenance.
        candidate_keys: int64 [K].
        group_keys: int64 [K].
        vectors: float32 [K, E].
        as_of_s: Request time the pairs were evaluated for.
    """

    stamp: Stamp
    candidate_keys: npt.NDArray[np.int64]
    group_keys: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    as_of_s: int
