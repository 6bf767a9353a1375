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
    lengths = offsets[1:] - offsets[:-1]
    taken = np.minimum(lengths, k)
    out_offsets = np.zeros(len(offsets), np.int64)
    np.cumsum(taken, out=out_offsets[1:])
    out = np.empty(int(out_offsets[-1]), np.int64)
    costs = _ordered_costs(values)
    # Short segments by their length, the others in classes within a factor of two, half of a matrix padding at most.
    longest = int(lengths.max(initial=0))
    classes = lengths if longest <= _SHORT else np.where(lengths <= _SHORT, lengths, _SHORT + np.frexp(lengths)[1])
    for each in np.flatnonzero(np.bincount(classes[taken > 0])).tolist():
        which = np.flatnonzero(classes == each)
        if each <= _SHORT:
            _rank(costs, offsets[which], each, k, out, out_offsets[which])
            continue
        own = lengths[which]
        columns = np.arange(int(own.max()))
        inside = columns < own[:, None]
        places = (offsets[which][:, None] + columns)[inside]
        # Words that hold cost and index.
        matrix = np.full((len(own), len(columns)), _PADDING, np.int64)
        matrix[inside] = (costs[places].astype(np.int64) << 32) | places
        if k < len(columns):
            matrix = np.partition(matrix, k - 1, axis=1)[:, :k]
        matrix.sort(axis=1)
        columns = columns[:k]
        kept = columns < taken[which][:, None]
        out[(out_offsets[which][:, None] + columns)[kept]] = matrix[kept] & _INDEX
    return out, out_offsets


_SHORT = 8
"""Longer segments are partitioned: comparing each element with each takes longer from about here on."""

_PADDING = 2**63 - 1
_INDEX = 2**32 - 1


def _rank(
    costs: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    length: int,
    k: int,
    out: npt.NDArray[np.int64],
    out_starts: npt.NDArray[np.int64],
) -> None:
    """Write the k best of S segments of one length: an element's place is how many others come before it."""
    places = starts + np.arange(length)[:, None]
    own = costs[places]
    ranks = np.zeros(own.shape, np.int8)
    for index in range(length - 1):
        # Of equals the earlier one.
        is_first = (own[index] <= own[index + 1 :]).view(np.int8)
        ranks[index + 1 :] += is_first
        ranks[index] += length - 1 - index
        ranks[index] -= np.add.reduce(is_first, axis=0, dtype=np.int8)
    if k >= length:
        out[out_starts + ranks] = places
        return
    kept = ranks < k
    out[(out_starts + ranks)[kept]] = places[kept]


def _ordered_costs(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Return integers that order as the facade says: the better value first, equal ones equal, NaN last."""
    costs = (np.zeros(1, np.float32) - values).view(np.int32)  # -0.0 and 0.0 become one
    costs ^= (costs >> 31) & np.int32(2**31 - 1)
    costs[np.isnan(values)] = 2**31 - 1
    return costs


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
