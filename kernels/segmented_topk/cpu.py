"""The O(N) path for CPUs: ``np.partition`` finds each segment's threshold, only the winners are sorted.

Many segments without tie keys are partitioned together: those of similar length become the rows of one matrix of words
that hold value and index, so nothing is done segment by segment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FEW_SEGMENTS = 8
"""Up to so many segments a loop is no slower, and it needs no words of 8 bytes for long ones."""


def segmented_topk_cpu(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.integer],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the k best of each segment; see ``segmented_topk``."""
    if tie_keys is None and len(offsets) > _FEW_SEGMENTS and len(values) < 2**32:
        return _together(values, np.asarray(offsets, np.int64), k)
    parts: list[npt.NDArray[np.int64]] = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        keys = None if tie_keys is None else tie_keys[begin:end]
        parts.append(_topk(values[begin:end], keys, min(k, end - begin)) + begin)
    ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return (np.concatenate(parts) if parts else np.zeros(0, np.int64)), ends


def _together(
    values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    lengths = np.diff(offsets)
    taken = np.minimum(lengths, k)
    out_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(taken)])
    out = np.empty(int(out_offsets[-1]), np.int64)
    words = _cost_words(values)
    # Short segments by their length, the others in classes within a factor of two, half of a matrix padding at most.
    classes = np.where(lengths <= _SHORT, lengths, _SHORT + np.frexp(lengths)[1])
    for each in np.unique(classes[taken > 0]).tolist():
        which = np.flatnonzero(classes == each)
        own = lengths[which]
        longest = int(own.max())
        if each <= _SHORT:
            matrix = words[offsets[which][:, None] + np.arange(longest)]
        else:
            inside = np.arange(longest) < own[:, None]
            matrix = np.full((len(which), longest), _PADDING, np.uint64)
            matrix[inside] = words[(offsets[which][:, None] + np.arange(longest))[inside]]
        if k < longest:
            matrix = np.partition(matrix, k - 1, axis=1)[:, :k]
        matrix.sort(axis=1)
        places = out_offsets[which][:, None] + np.arange(matrix.shape[1])
        indices = (matrix & np.uint64(0xFFFFFFFF)).view(np.int64)
        if each <= _SHORT:
            out[places] = indices
        else:
            kept = np.arange(matrix.shape[1]) < taken[which][:, None]
            out[places[kept]] = indices[kept]
    return out, out_offsets


_SHORT = 16
_PADDING = np.uint64(2**64 - 1)


def _cost_words(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """Return words that order as the facade says: the better value first, NaN last, then the smaller index."""
    cost = np.zeros(1, np.float32) - values  # -0.0 and 0.0 become one
    bits = cost.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered[np.isnan(cost)] = np.uint32(2**32 - 1)
    return (ordered.astype(np.uint64) << np.uint64(32)) | np.arange(len(values), dtype=np.uint64)


def _topk(values: npt.NDArray[np.float32], keys: npt.NDArray[np.int64] | None, k: int) -> npt.NDArray[np.int64]:
    if k == 0:
        return np.zeros(0, np.int64)
    # Negated, so that numpy's own "NaN is largest" puts NaN last; only NaN and the sign change.
    cost = -values
    chosen = np.arange(len(cost)) if k == len(cost) else _smallest(cost, keys, k)
    by_index = chosen if keys is None else keys[chosen]
    return chosen[np.lexsort((chosen, by_index, cost[chosen]))]


def _smallest(cost: npt.NDArray[np.float32], keys: npt.NDArray[np.int64] | None, k: int) -> npt.NDArray[np.int64]:
    """Return which k elements have the least cost, in any order; ties at the threshold by key, then index."""
    threshold = np.partition(cost, k - 1)[k - 1]
    if np.isnan(threshold):
        inside, tied = np.flatnonzero(~np.isnan(cost)), np.flatnonzero(np.isnan(cost))
    else:
        inside, tied = np.flatnonzero(cost < threshold), np.flatnonzero(cost == threshold)
    missing = k - len(inside)
    if missing < len(tied) and keys is not None:
        tied = tied[_first_by_key(keys[tied], missing)]
    # Indices ascend, so the first of the tied are those of smaller index.
    return np.concatenate([inside, tied[:missing]])


def _first_by_key(keys: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the positions of the ``count`` smallest keys, of equal keys the smaller position."""
    if count == 0:
        return np.zeros(0, np.int64)
    threshold = np.partition(keys, count - 1)[count - 1]
    below, equal = np.flatnonzero(keys < threshold), np.flatnonzero(keys == threshold)
    return np.concatenate([below, equal[: count - len(below)]])
