"""The k best of each segment by radix selection."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kernels.native.library import check_done, load, num_threads

SEGMENT_MAX = 2**32 - 1


class _TopkArguments(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("out_offsets", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("boundary", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("most_records", ctypes.c_int64),
    ]


def segmented_topk(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the k best of each segment, best first.

    Order: larger value first; equal values (both zeros are) by smaller tie key, then by smaller index; NaN last. At
    most three passes over the elements that can still be among the best, so O(N + R log R) for R results, whatever the
    values; only ties at the threshold with tie keys take O(their number) on average. Segments run in parallel.

    Args:
        values: float32 [N].
        offsets: int64 [S + 1], ascending from 0 to N.
        k: At least 0; a shorter segment gives all of its elements.
        tie_keys: int64 [N], None: equal values by index alone.

    Returns:
        Indices into ``values``, int64 [R], and their offsets, int64 [S + 1].

    Raises:
        ValueError: an argument breaks these rules.
        NativeUnavailableError: there is no native library.
    """
    _check(values, offsets, k, tie_keys)
    lengths = offsets[1:] - offsets[:-1]
    out_offsets = np.zeros(len(offsets), np.int64)
    np.cumsum(np.minimum(lengths, k), out=out_offsets[1:])
    out = np.empty(int(out_offsets[-1]), np.int64)
    if not len(out):
        return out, out_offsets
    library = load()
    values, offsets = np.ascontiguousarray(values), np.ascontiguousarray(offsets)
    ties = None if tie_keys is None else np.ascontiguousarray(tie_keys)
    threads, longest = min(num_threads(), len(lengths)), int(lengths.max())
    # Pages that no thread writes cost nothing, so the worst case is asked for.
    boundary = np.empty(threads * longest, np.uint32)
    most_records = max(min(k, longest), min(longest, library.rankmesh_topk_short_segment()))
    records = np.empty(2 * threads * most_records * library.rankmesh_topk_record_bytes(), np.uint8)
    arguments = _TopkArguments(
        values.ctypes.data,
        None if ties is None else ties.ctypes.data,
        offsets.ctypes.data,
        out_offsets.ctypes.data,
        out.ctypes.data,
        boundary.ctypes.data,
        records.ctypes.data,
        len(lengths),
        longest,
        most_records,
    )
    check_done(library.rankmesh_segmented_topk(ctypes.byref(arguments), ctypes.c_int(threads)), "segmented_topk")
    return out, out_offsets


def _check(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None,
) -> None:
    if values.ndim != 1 or values.dtype != np.float32:
        raise ValueError(f"values must be float32 [N], are {values.dtype} {values.shape}")
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 1:
        raise ValueError(f"offsets must be int64 [S + 1], are {offsets.dtype} {offsets.shape}")
    lengths = offsets[1:] - offsets[:-1]
    if offsets[0] != 0 or offsets[-1] != len(values) or bool((lengths < 0).any()):
        raise ValueError(f"offsets must ascend from 0 to {len(values)}")
    if bool((lengths > SEGMENT_MAX).any()):
        raise ValueError(f"a segment must have at most {SEGMENT_MAX} elements, one has {lengths.max()}")
    if tie_keys is not None and (tie_keys.shape != values.shape or tie_keys.dtype != np.int64):
        raise ValueError(f"tie_keys must be int64 [{len(values)}], are {tie_keys.dtype} {tie_keys.shape}")
    if k < 0:
        raise ValueError(f"k must be at least 0, is {k}")
