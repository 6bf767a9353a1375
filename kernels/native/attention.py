"""Attention of many query rows to packed keys: candidates to their request's history, and blocks within sequences."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.native.checks import check_range, check_requests, check_tensor, sort_by_request
from kernels.native.library import check_done, load, num_threads, pointer

Activation: TypeAlias = Literal["softmax", "silu"]

HEAD_WIDTH_MAX = 256
KEY_PANEL = 64
"""Positions of one sequence are padded to a multiple of this."""
ROWS_OF_A_TASK = 120
"""Query rows that one task takes: ten groups of twelve. More would leave a thread idle at the end of small batches."""

_ACTIVATIONS: dict[str, int] = {"softmax": 0, "silu": 1}


class PackedKeysStruct(ctypes.Structure):
    """``PackedKeys`` of attention.h."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("head_width", ctypes.c_int32),
    ]


class _KeySource(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
    ]


class _BroadcastArguments(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("tasks", ctypes.c_void_p),
        ("num_tasks", ctypes.c_int64),
        ("rows_max", ctypes.c_int64),
        ("num_queries", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("out_is_fp32", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class _BlockArguments(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("tile_ends", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_width", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("window_blocks", ctypes.c_int64),
        ("causal", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys and values of B sequences in the layout of the kernels, made by ``pack_keys``; opaque.

    Args:
        keys: int32, pairs of bf16.
        values: int32, pairs of bf16.
        starts: int64 [B + 1], padded positions.
        lengths: int64 [B], keys of each sequence.
        num_heads: H.
        head_width: K.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    num_heads: int
    head_width: int
    struct: PackedKeysStruct = field(repr=False, compare=False)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.lengths)


class _KeptMemory(threading.local):
    """Memory of one thread for keys that live no longer than a call: fresh pages would cost a tenth of the call."""

    def __init__(self) -> None:
        self._keys = torch.empty(0, dtype=torch.int32)
        self._values = torch.empty(0, dtype=torch.int32)

    def take(self, num_keys: int, num_values: int) -> tuple[Tensor, Tensor]:
        """Return both arrays, at least so long; what was returned before is invalid."""
        if len(self._keys) < num_keys:
            self._keys = torch.empty(num_keys, dtype=torch.int32)
        if len(self._values) < num_values:
            self._values = torch.empty(num_values, dtype=torch.int32)
        return self._keys, self._values


_KEPT = _KeptMemory()


def pack_keys(keys: Tensor, values: Tensor, *, offsets: Tensor | None = None, mask: Tensor | None = None) -> PackedKeys:
    """Pack the keys and values of B sequences, once for any number of queries.

    Args:
        keys: bf16 [B, T, H, K], or jagged [T, H, K] with offsets; K at most 256.
        values: The same.
        offsets: int64 [B + 1], for the jagged form.
        mask: bool [B, T], true where a key may be seen, for the padded form; None: all of them. Other keys are
            left out, so they cost nothing.

    Raises:
        ValueError: a tensor breaks these rules.
        NativeUnavailableError: there is no native library.
    """
    return _pack(keys, values, offsets, mask, for_one_call=False)


def _pack(
    keys: Tensor, values: Tensor, offsets: Tensor | None, mask: Tensor | None, *, for_one_call: bool
) -> PackedKeys:
    if offsets is None:
        check_tensor("keys", keys, torch.bfloat16, None, None, None, None)
        num_sequences, length = keys.shape[:2]
        offsets = torch.arange(num_sequences + 1) * length
    else:
        check_tensor("keys", keys, torch.bfloat16, None, None, None)
        check_offsets(offsets, len(keys))
        num_sequences = len(offsets) - 1
    check_tensor("values", values, torch.bfloat16, *keys.shape)
    num_heads, head_width = keys.shape[-2:]
    _check_heads(num_heads, head_width)
    positions = None
    if mask is not None:
        check_tensor("mask", mask, torch.bool, *keys.shape[:2])
        positions = mask.flatten().nonzero().flatten()
        offsets = torch.zeros(num_sequences + 1, dtype=torch.int64)
        torch.cumsum(mask.sum(1), 0, out=offsets[1:])
    lengths = offsets[1:] - offsets[:-1]
    starts = torch.zeros(num_sequences + 1, dtype=torch.int64)
    torch.cumsum((lengths + KEY_PANEL - 1) // KEY_PANEL * KEY_PANEL, 0, out=starts[1:])
    num_padded = int(starts[-1]) * num_heads
    num_keys, num_values = num_padded * ((head_width + 1) // 2), num_padded // 2 * ((head_width + 15) // 16 * 16)
    if for_one_call:
        packed_keys, packed_values = _KEPT.take(num_keys, num_values)
    else:
        packed_keys, packed_values = (torch.empty(size, dtype=torch.int32) for size in (num_keys, num_values))
    struct = PackedKeysStruct(
        pointer(packed_keys), pointer(packed_values), pointer(starts), pointer(lengths), num_heads, head_width
    )
    source = _KeySource(pointer(keys), pointer(values), pointer(offsets), pointer(positions))
    code = load().rankmesh_pack_keys(
        ctypes.byref(source), ctypes.byref(struct), ctypes.c_int64(num_sequences), ctypes.c_int(num_threads())
    )
    check_done(code, "pack_keys")
    return PackedKeys(packed_keys, packed_values, starts, lengths, num_heads, head_width, struct)


def check_offsets(offsets: Tensor, num_positions: int) -> None:
    """Check jagged offsets.

    Raises:
        ValueError: they are not int64 [B + 1], ascending from 0 to ``num_positions``.
    """
    check_tensor("offsets", offsets, torch.int64, None)
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != num_positions or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"offsets must ascend from 0 to {num_positions}, are {bounds[:8]}")


def broadcast_attention(
    q: Tensor,
    k: Tensor | PackedKeys,
    v: Tensor | None = None,
    candidate_to_request: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    scale: float | None = None,
    activation: Activation = "softmax",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Let candidates attend to the keys of their own request, which are never copied a candidate.

    All query rows of one request and head are the rows of one matrix product; scores, softmax and sums are fp32.

    Args:
        q: bf16 [C, Q, H, K].
        k: bf16 [B, T, H, K], jagged [T, H, K] with ``offsets``, or what ``pack_keys`` made (then v and offsets
            are None).
        v: Like k.
        candidate_to_request: int32 [C] in [0, B), any order; None: there is one request.
        offsets: int64 [B + 1], for jagged keys.
        scale: Factor of the scores, positive; None: K ** -0.5.
        activation: ``softmax``, or ``silu``: sum of silu(scale * q k) v, not normalised.
        out_dtype: bf16 or fp32.

    Returns:
        [C, Q, H, K]; 0 for a candidate whose request has no keys.

    Raises:
        ValueError: an argument breaks these rules.
        NativeUnavailableError: there is no native library.
    """
    if isinstance(k, PackedKeys):
        if v is not None or offsets is not None:
            raise ValueError("v and offsets must be None with packed keys")
        packed = k
    else:
        if v is None:
            raise ValueError("v must be given, is None")
        packed = _pack(k, v, offsets, None, for_one_call=True)
    check_tensor("q", q, torch.bfloat16, None, None, packed.num_heads, packed.head_width)
    factor = _check_options(scale, activation, out_dtype, packed.head_width)
    num_candidates, num_queries = q.shape[:2]
    index = check_requests(candidate_to_request, num_candidates, packed.num_sequences)
    out = torch.empty(q.shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    order, begins = sort_by_request(index, packed.num_sequences)
    candidates_of_task = max(1, ROWS_OF_A_TASK // num_queries)
    tasks = _split(begins, candidates_of_task)
    arguments = _BroadcastArguments(
        pointer(q),
        pointer(out),
        pointer(order),
        pointer(tasks),
        len(tasks),
        candidates_of_task * num_queries,
        num_queries,
        _ACTIVATIONS[activation],
        int(out_dtype == torch.float32),
        factor,
    )
    code = load().rankmesh_broadcast_attention(
        ctypes.byref(arguments), ctypes.byref(packed.struct), ctypes.c_int(num_threads())
    )
    check_done(code, "broadcast_attention")
    return out


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block: int,
    window_blocks: int,
    causal: bool = True,
    activation: Activation = "softmax",
    scale: float | None = None,
) -> Tensor:
    """Let positions attend to the last blocks of their own sequence.

    Args:
        q: bf16 [T, H, K], jagged.
        k: The same.
        v: The same.
        offsets: int64 [B + 1]; a sequence may be empty.
        block: Positions of a block, at least 1; the last block of a sequence may be shorter.
        window_blocks: Blocks that a position sees, its own among them, at least 1.
        causal: Within its own block a position sees those up to itself; else the whole block.
        activation: ``softmax`` or ``silu``, as in ``broadcast_attention``.
        scale: Factor of the scores, positive; None: K ** -0.5.

    Returns:
        bf16 [T, H, K].

    Raises:
        ValueError: an argument breaks these rules.
        NativeUnavailableError: there is no native library.
    """
    check_tensor("q", q, torch.bfloat16, None, None, None)
    check_tensor("k", k, torch.bfloat16, *q.shape)
    check_tensor("v", v, torch.bfloat16, *q.shape)
    check_offsets(offsets, len(q))
    check_range("block", block, 1, 2**31)
    check_range("window_blocks", window_blocks, 1, 2**31)
    num_heads, head_width = q.shape[1:]
    _check_heads(num_heads, head_width)
    factor = _check_options(scale, activation, torch.bfloat16, head_width)
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    tile_ends = torch.empty_like(offsets)
    arguments = _BlockArguments(
        *map(pointer, (q, k, v, out, offsets, tile_ends)),
        len(offsets) - 1,
        num_heads,
        head_width,
        block,
        window_blocks,
        int(causal),
        _ACTIVATIONS[activation],
        factor,
    )
    code = load().rankmesh_block_attention(ctypes.byref(arguments), ctypes.c_int(num_threads()))
    check_done(code, "block_attention")
    return out


def _check_heads(num_heads: int, head_width: int) -> None:
    check_range("head width", head_width, 1, HEAD_WIDTH_MAX)
    check_range("number of heads", num_heads, 1, 1024)


def _check_options(scale: float | None, activation: str, out_dtype: torch.dtype, head_width: int) -> float:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, is {activation!r}")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float32, is {out_dtype}")
    factor = head_width**-0.5 if scale is None else scale
    check_range("scale", factor, 1e-30, 1e30)
    return factor


def _split(begins: Tensor, size: int) -> Tensor:
    """Split each request's candidates: int64 [tasks, 3] of request, first and last place."""
    ends = begins.tolist()
    tasks = [
        (request, first, min(first + size, end))
        for request, (begin, end) in enumerate(pairwise(ends))
        for first in range(begin, end, size)
    ]
    return torch.tensor(tasks, dtype=torch.int64).view(-1, 3)
