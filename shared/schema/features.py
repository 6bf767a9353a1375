"""The candidates of one request as jagged table rows, ids de-duplicated (preprocess -> embedding, ranking)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.schema.stamp import Stamp


@dataclass(frozen=True, slots=True)
class PreprocessTask:
    """What preprocess is asked: the candidates of one request, and what they carry.

    Args:
        request_id: The request.
        version: Weights version whose vocabulary and catalog apply.
        surface: Surface name.
        block: The candidates as a block of ``shared.wire``, as the client sent it where it sent one.
        remaining_ms: Budget left when the call was made.
    """

    request_id: str
    version: str
    surface: str
    block: bytes
    remaining_ms: float


@dataclass(frozen=True, slots=True)
class JaggedIds:
    """Ids of one feature for C candidates, jagged.

    Candidate ``c`` owns ``values[offsets[c]:offsets[c + 1]]``; for lengths 2, 0, 1 the offsets are 0, 2, 2, 3.

    Args:
        values: int32 [T], positions in ``FeatureBatch.unique_rows`` of the feature's table.
        offsets: int32 [C + 1], non-decreasing, from 0 to T.
    """

    values: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """The candidate side of one request.

    Args:
        stamp: Provenance.
        candidate_keys: int64 [C], the 64-bit id keys, in request order.
        group_keys: int64 [C], key of each candidate's ad group (for the speculative cache), 0 when unknown.
        unique_rows: table -> int64 [U], the distinct rows that this request needs, ascending; 0 = out of vocabulary.
        features: feature -> its jagged ids.
        dense: float32 [C, number of dense candidate features].
        num_oov: feature -> number of ids that no vocabulary holds, served by row 0.
    """

    stamp: Stamp
    candidate_keys: npt.NDArray[np.int64]
    group_keys: npt.NDArray[np.int64]
    unique_rows: dict[str, npt.NDArray[np.int64]]
    features: dict[str, JaggedIds]
    dense: npt.NDArray[np.float32]
    num_oov: dict[str, int]

    @property
    def num_candidates(self) -> int:
        """Number of candidates C."""
        return len(self.candidate_keys)
