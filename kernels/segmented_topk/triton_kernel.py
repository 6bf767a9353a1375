"""Triton kernels of segmented_topk: radix select, the same answer on every run.

A value becomes an unsigned key that orders as the facade says (larger is better, both zeros equal, NaN below
everything); the tie key a second one (smaller is better). Histograms of 8 bits at a time narrow down the k-th best key
of each segment: four rounds for the value, eight more for tie keys, integer additions only. Then every block counts
what is better than the threshold and what equals it, a cumulative sum gives each block its place, and a second pass
writes: by place, not by the order in which blocks happen to arrive. Of what equals the threshold in both keys the
smaller indices are taken.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import require_triton
from kernels.gpu.lang import jit

_BINS = 256
_BITS = tl.constexpr(8)
_BLOCK = 4096
_VALUE_ROUNDS, _TIE_ROUNDS = 4, 8


@jit
def _value_key(value: tl.tensor) -> tl.tensor:
    """Map float32 to a key in [0, 2^32), int64: larger values first in descending order, NaN is 0."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    # Negative numbers order backwards: their bits are flipped; the others move above them.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return tl.where(value == value, ordered, 0)


@jit
def _prefix_of(key: tl.tensor, KEPT: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the upper KEPT bits of a key of WIDTH bits; a tie key keeps its sign, so nothing is lost."""
    return key >> (WIDTH - KEPT)


@jit
def histogram_kernel(
    values: tl.tensor,
    ties: tl.tensor,
    offsets: tl.tensor,
    value_threshold: tl.tensor,
    prefix: tl.tensor,
    counts: tl.tensor,
    BY_TIE: tl.constexpr,
    KEPT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add to counts [S, BINS] the next 8 bits of the keys of segment s whose upper KEPT bits are prefix[s].

    Of tie keys, complemented so that larger is better, only those whose value is the segment's threshold.
    """
    segment = tl.program_id(1)
    begin, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    if begin + tl.program_id(0).to(tl.int64) * BLOCK >= end:
        return
    place = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = place < end
    key = _value_key(tl.load(values + place, mask=counted, other=0.0))
    if BY_TIE:
        counted = counted & (key == tl.load(value_threshold + segment))
        key = ~tl.load(ties + place, mask=counted, other=0)
        digit = (_prefix_of(key, KEPT + _BITS, 64) & (BINS - 1)).to(tl.int32)
        if KEPT == 0:
            # The first digit holds the sign: moved so that negative keys come first.
            digit = digit ^ 128
        else:
            counted = counted & (_prefix_of(key, KEPT, 64) == tl.load(prefix + segment))
    else:
        digit = (_prefix_of(key, KEPT + _BITS, 32) & (BINS - 1)).to(tl.int32)
        counted = counted & (_prefix_of(key, KEPT, 32) == tl.load(prefix + segment))
    found = tl.histogram(digit, BINS, mask=counted)
    tl.atomic_add(counts + segment * BINS + tl.arange(0, BINS), found, mask=found > 0)


@jit
def narrow_kernel(
    counts: tl.tensor, prefix: tl.tensor, missing: tl.tensor, BY_TIE: tl.constexpr, KEPT: tl.constexpr,
    BINS: tl.constexpr,
) -> None:  # fmt: skip
    """Take the digit in which the k-th best of segment s lies into prefix[s], what is better off missing[s]."""
    segment = tl.program_id(0)
    # From the largest digit down.
    digit = BINS - 1 - tl.arange(0, BINS)
    count = tl.load(counts + segment * BINS + digit)
    wanted = tl.load(missing + segment)
    reached = tl.cumsum(count, 0)
    is_it = (reached >= wanted) & (reached - count < wanted)
    taken = tl.sum(tl.where(is_it, digit, 0), 0).to(tl.int64)
    better = tl.sum(tl.where(is_it, reached - count, 0), 0)
    if BY_TIE and KEPT == 0:
        # Back to the sign that was moved: the prefix of a negative key is negative.
        tl.store(prefix + segment, taken - 128)
    else:
        tl.store(prefix + segment, tl.load(prefix + segment) * BINS + taken)
    tl.store(missing + segment, wanted - better)


@jit
def place_kernel(
    values: tl.tensor,
    ties: tl.tensor,
    offsets: tl.tensor,
    value_threshold: tl.tensor,
    tie_threshold: tl.tensor,
    missing: tl.tensor,
    out_offsets: tl.tensor,
    better_before: tl.tensor,
    equal_before: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.tensor,
    HAS_TIES: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count, or write the places of, what is better than a segment's threshold and what equals it.

    Counting (WRITE false) fills better_before and equal_before [S, blocks] with the counts; writing reads their
    exclusive cumulative sums along blocks there, and puts indices into out: the better ones first, then ``missing``
    equal ones.
    """
    block, segment = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    place = begin + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < end
    key = _value_key(tl.load(values + place, mask=inside, other=0.0))
    threshold = tl.load(value_threshold + segment)
    better, equal = inside & (key > threshold), inside & (key == threshold)
    if HAS_TIES:
        tie = ~tl.load(ties + place, mask=equal, other=0)
        tie_wanted = tl.load(tie_threshold + segment)
        better, equal = better | (equal & (tie > tie_wanted)), equal & (tie == tie_wanted)
    slot = segment * num_blocks + block
    if WRITE:
        first, last = tl.load(out_offsets + segment), tl.load(out_offsets + segment + 1)
        quota = tl.load(missing + segment)
        rank = tl.load(better_before + slot) + tl.cumsum(better.to(tl.int32), 0) - 1
        tl.store(out + first + rank, place, mask=better)
        rank = tl.load(equal_before + slot) + tl.cumsum(equal.to(tl.int32), 0) - 1
        tl.store(out + last - quota + rank, place, mask=equal & (rank < quota))
    else:
        tl.store(better_before + slot, tl.sum(better.to(tl.int32), 0))
        tl.store(equal_before + slot, tl.sum(equal.to(tl.int32), 0))


def segmented_topk_on_device(
    values: Tensor, offsets: Tensor, k: int, tie_keys: Tensor | None, length_max: int
) -> tuple[Tensor, Tensor]:
    """Return the k best of each segment; the host waits once, for the number of results.

    Args:
        values: float32 [N].
        offsets: int64 [S + 1] from 0 to N.
        k: At least 0.
        tie_keys: int64 [N], or None.
        length_max: Of a segment; the grid is laid out for it, the lengths themselves are not read.

    Returns:
        Indices, int64 [R], best first, and their offsets, int64 [S + 1]; as the facade says.
    """
    lengths = offsets.diff()
    taken = lengths.clamp_max(k)
    out_offsets = torch.cat([offsets.new_zeros(1), torch.cumsum(taken, 0)])
    num_segments, num_results = len(lengths), int(out_offsets[-1])
    out = torch.empty(num_results, dtype=torch.int64, device=values.device)
    if num_results == 0:
        return out, out_offsets
    num_blocks = triton.cdiv(length_max, _BLOCK)
    grid = (num_blocks, num_segments)
    missing = taken.int()
    zeros = torch.zeros(num_segments, dtype=torch.int64, device=values.device)
    ties = values if tie_keys is None else tie_keys
    value_threshold, tie_threshold = zeros.clone(), zeros.clone()
    rounds = [(False, 8 * i, value_threshold) for i in range(_VALUE_ROUNDS)]
    if tie_keys is not None:
        rounds += [(True, 8 * i, tie_threshold) for i in range(_TIE_ROUNDS)]
    for by_tie, kept, prefix in rounds:
        counts = torch.zeros(num_segments, _BINS, dtype=torch.int32, device=values.device)
        options = {"BY_TIE": by_tie, "KEPT": kept, "BINS": _BINS}
        histogram_kernel[grid](values, ties, offsets, value_threshold, prefix, counts, BLOCK=_BLOCK, **options)
        narrow_kernel[(num_segments,)](counts, prefix, missing, **options)
    better = torch.empty(num_segments, num_blocks, dtype=torch.int32, device=values.device)
    equal = torch.empty_like(better)
    thresholds = (values, ties, offsets, value_threshold, tie_threshold, missing, out_offsets)
    flags = {"HAS_TIES": tie_keys is not None, "BLOCK": _BLOCK}
    place_kernel[grid](*thresholds, better, equal, out, num_blocks, WRITE=False, **flags)
    better, equal = (torch.cumsum(x, 1, dtype=torch.int32) - x for x in (better, equal))
    place_kernel[grid](*thresholds, better, equal, out, num_blocks, WRITE=True, **flags)
    return _sorted(out, values, tie_keys, taken), out_offsets


def _sorted(chosen: Tensor, values: Tensor, tie_keys: Tensor | None, taken: Tensor) -> Tensor:
    """Put the winners of each segment in order: stable sorts by index, tie key, value and at last segment."""
    segment = torch.repeat_interleave(torch.arange(len(taken), device=taken.device), taken)
    order = torch.argsort(chosen)
    if tie_keys is not None:
        order = order[torch.argsort(tie_keys[chosen[order]], stable=True)]
    # Negated, so that NaN, which sorts last, comes last.
    order = order[torch.argsort(-values[chosen[order]], stable=True)]
    order = order[torch.argsort(segment[order], stable=True)]
    return chosen[order]


def segmented_topk_triton(
    values: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.integer],
    k: int,
    tie_keys: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Copy to the GPU, select there, copy back; see ``segmented_topk``. Without a GPU kernels must be interpreted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device = torch.tensor(values, device=device)
    require_triton(on_device)
    length_max = int(np.diff(offsets).max(initial=0))
    keys = None if tie_keys is None else torch.tensor(tie_keys, device=device)
    bounds = torch.tensor(offsets.astype(np.int64), device=device)
    indices, ends = segmented_topk_on_device(on_device, bounds, k, keys, length_max)
    return indices.cpu().numpy(), ends.cpu().numpy()


def _cases() -> list[AotCase]:
    pointers = {"values": "*fp32", "ties": "*i64", "offsets": "*i64", "value_threshold": "*i64"}
    histogram = pointers | {"prefix": "*i64", "counts": "*i32"}
    narrowing = {"counts": "*i32", "prefix": "*i64", "missing": "*i32"}
    placing = pointers | {"tie_threshold": "*i64", "missing": "*i32", "out_offsets": "*i64"}
    placing |= {"better_before": "*i32", "equal_before": "*i32", "out": "*i64"}
    cases = []
    for by_tie, kept in ((False, 8), (True, 0), (True, 8)):
        options = {"BY_TIE": by_tie, "KEPT": kept, "BINS": _BINS}
        label = f"{'tie' if by_tie else 'value'}.{kept}"
        cases.append(
            AotCase(
                f"segmented_topk.histogram.{label}", histogram_kernel, histogram, options | {"BLOCK": _BLOCK},
                aligned=tuple(histogram),
            )
        )  # fmt: skip
        cases.append(
            AotCase(f"segmented_topk.narrow.{label}", narrow_kernel, narrowing, options, aligned=tuple(narrowing))
        )
    for write in (False, True):
        constants = {"HAS_TIES": True, "WRITE": write, "BLOCK": _BLOCK}
        name = f"segmented_topk.{'write' if write else 'count'}"
        arguments = placing | {"num_blocks": "i32"}
        cases.append(AotCase(name, place_kernel, arguments, constants, aligned=tuple(placing)))
    return cases


AOT_CASES = _cases()
