"""Segmented top-k: the k best of each of many jagged segments, in O(N), with one defined order. See README.md."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.segmented_topk.cpu import segmented_topk_cpu
from kernels.segmented_topk.reference import segmented_topk_reference

Backend: TypeAlias = Literal["cpu", "reference", "native", "triton"]

_BACKENDS = ("cpu", "native", "reference", "triton")


def segmented_topk(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.integer],
    k: int,
    *,
    tie_keys: npt.NDArray[np.int64] | None = None,
    backend: Backend = "cpu",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the k best of each segment, best first.

    Order: larger value first; equal values by smaller tie key, then by smaller index; NaN after everything else.

    Args:
        values: float32 [N].
        offsets: integers [S + 1] from 0 to N, non-decreasing; segment ``s`` is ``values[offsets[s]:offsets[s + 1]]``.
        k: At least 0; a shorter segment gives all of its elements.
        tie_keys: int64 [N], None: equal values by index alone.
        backend: ``cpu``: numpy, O(N + R log R) for R results; ``reference``: a full sort; ``native``: the same in C++;
            ``triton``: on the GPU, or interpreted. All give the same answer.

    Returns:
        Indices into ``values``, int64 [R], and their offsets, int64 [S + 1]: lengths are ``min(k, segment length)``.

    Raises:
        ValueError: the shapes, the offsets, k or the backend break a rule.
        BackendUnavailableError: the backend cannot run here.

    Example:
        >>> values = np.array([1.0, 3.0, 3.0, 2.0, 9.0], np.float32)
        >>> indices, offsets = segmented_topk(values, np.array([0, 4, 4, 5]), 2)
        >>> indices.tolist(), offsets.tolist()
        ([1, 2, 4], [0, 2, 2, 3])
    """
    if values.ndim != 1 or values.dtype != np.float32:
        raise ValueError(f"values must be float32 [N], are {values.dtype} {values.shape}")
    if not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"offsets must be integers [S + 1], are {offsets.dtype} {offsets.shape}")
    if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(values):
        raise ValueError(f"offsets must be [S + 1] from 0 to {len(values)}, have shape {offsets.shape}")
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError("offsets must not decrease")
    if tie_keys is not None and (tie_keys.shape != values.shape or tie_keys.dtype != np.int64):
        raise ValueError(f"tie_keys must be int64 [{len(values)}], are {tie_keys.dtype} {tie_keys.shape}")
    if not k >= 0 or k % 1:
        raise ValueError(f"k must be at least 0 and whole, is {k}")
    k = min(int(k), len(values))  # more would not fit the C type of the native form
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {sorted(_BACKENDS)}, is {backend!r}")
    if backend == "reference":
        return segmented_topk_reference(values, offsets, k, tie_keys)
    if backend == "cpu":
        return segmented_topk_cpu(values, offsets, k, tie_keys)
    # torch is imported for these two only.
    if backend == "native":
        return _native(values, offsets, k, tie_keys)
    from kernels.segmented_topk.triton_kernel import segmented_topk_triton

    return segmented_topk_triton(values, offsets, k, tie_keys)


def _native(
    values: npt.NDArray[np.float32], offsets: npt.NDArray[np.integer], k: int, tie_keys: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    import torch

    from kernels.backends import native_library

    native = native_library(torch.empty(0))
    ends = np.ascontiguousarray(offsets, np.int64)
    keys = None if tie_keys is None else np.ascontiguousarray(tie_keys)
    found: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    found = native.segmented_topk(np.ascontiguousarray(values), ends, k, keys)
    return found
