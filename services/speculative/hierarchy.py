"""From stored embeddings to one (possibly absent) embedding a candidate: exact pair, else ad group, else none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.schema.speculative import HitLevel

Vectors = npt.NDArray[np.float32]
Levels = npt.NDArray[np.int8]


def resolve(
    candidate_keys: npt.NDArray[np.int64],
    group_keys: npt.NDArray[np.int64],
    stored_keys: npt.NDArray[np.int64],
    stored_groups: npt.NDArray[np.int64],
    stored_vectors: Vectors,
) -> tuple[Vectors, Levels]:
    """Find the best embedding of each candidate.

    The user aggregate is the mean of the user's stored embeddings in the candidate's ad group; group 0 is no group.

    Args:
        candidate_keys: int64 [C].
        group_keys: int64 [C], ad group of each candidate.
        stored_keys: int64 [P], ascending, distinct.
        stored_groups: int64 [P].
        stored_vectors: float32 [P, E].

    Returns:
        float32 [C, E], zero where there is none, and the ``HitLevel`` of each: int8 [C].
    """
    vectors = np.zeros((len(candidate_keys), stored_vectors.shape[1]), np.float32)
    levels = np.full(len(candidate_keys), HitLevel.NONE, np.int8)
    if len(stored_keys) == 0:
        return vectors, levels
    positions = np.minimum(np.searchsorted(stored_keys, candidate_keys), len(stored_keys) - 1)
    is_exact = stored_keys[positions] == candidate_keys
    vectors[is_exact] = stored_vectors[positions[is_exact]]
    levels[is_exact] = HitLevel.EXACT
    groups, means = _group_means(stored_groups, stored_vectors)
    if len(groups):
        positions = np.minimum(np.searchsorted(groups, group_keys), len(groups) - 1)
        is_known = ~is_exact & (groups[positions] == group_keys)
        vectors[is_known] = means[positions[is_known]]
        levels[is_known] = HitLevel.USER_AGGREGATE
    return vectors, levels


def _group_means(groups: npt.NDArray[np.int64], vectors: Vectors) -> tuple[npt.NDArray[np.int64], Vectors]:
    """Return the distinct groups, ascending and without 0, and the mean vector of each."""
    in_group = groups != 0
    distinct, inverse = np.unique(groups[in_group], return_inverse=True)
    sums = np.zeros((len(distinct), vectors.shape[1]), np.float64)  # float64: the order of additions cannot show
    np.add.at(sums, inverse, vectors[in_group])
    return distinct, (sums / np.bincount(inverse, minlength=len(distinct))[:, None]).astype(np.float32)
