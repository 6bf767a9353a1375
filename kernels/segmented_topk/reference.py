"""The plain truth: sort each segment whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def segmented_topk_reference(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.integer],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the k best of each segment; see ``segmented_topk``."""
    chosen: list[int] = []
    ends = [0]
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):

        def rank(index: int) -> tuple[bool, float, int, int]:
            value = float(values[index])
            missing = value != value
            return missing, 0.0 if missing else -value, 0 if tie_keys is None else int(tie_keys[index]), index

        chosen += sorted(range(begin, end), key=rank)[:k]
        ends.append(len(chosen))
    return np.array(chosen, np.int64), np.array(ends, np.int64)
