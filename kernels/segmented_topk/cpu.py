"""The O(N) path for CPUs: ``np.partition`` finds each segment's threshold, only the winners are sorted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def segmented_topk_cpu(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.integer],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the k best of each segment; see ``segmented_topk``."""
    parts: list[npt.NDArray[np.int64]] = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        keys = None if tie_keys is None else tie_keys[begin:end]
        parts.append(_topk(values[begin:end], keys, min(k, end - begin)) + begin)
    ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return (np.concatenate(parts) if parts else np.zeros(0, np.int64)), ends


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
