"""Triton kernel of LinearBatch: products of any shapes in one persistent launch, described by a table of pointers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import jit, narrow, product_tile
from kernels.gpu.launch import num_programs

_FIELDS = 7
"""Of a table row: addresses of x, weight and out, then M, N, K and the row stride of x."""
_ALIGNMENT_BYTES = 16
_TILE = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}
# Narrow loads hold their tiles in registers: with four warps those would spill.
_UNALIGNED_TILE = _TILE | {"num_warps": 8}
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit
def linear_batch_kernel(
    table: tl.tensor,
    num_problems: tl.tensor,
    programs: tl.tensor,
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write x_i W_i^T for every row of the table; program p takes tiles p, p + programs, .. of all in order."""
    tile = tl.program_id(0)
    passed = 0
    for problem in tl.range(0, num_problems):
        row = table + problem * FIELDS
        M, N, K = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
        tiles_n = tl.cdiv(N, BN)
        tiles = tl.cdiv(M, BM) * tiles_n
        x = tl.load(row).to(tl.pointer_type(DTYPE))
        weight = tl.load(row + 1).to(tl.pointer_type(DTYPE))
        out = tl.load(row + 2).to(tl.pointer_type(DTYPE))
        x_stride = tl.load(row + 6)
        if ALIGNED:
            # What a launch finds out about its own arguments must be said of what comes from memory.
            x, weight = tl.multiple_of(x, 16), tl.multiple_of(weight, 16)
            K, x_stride = tl.multiple_of(K, 8), tl.multiple_of(x_stride, 8)
        while tile < passed + tiles:
            local = tile - passed
            rows = (local // tiles_n) * BM + tl.arange(0, BM)
            columns = (local % tiles_n) * BN + tl.arange(0, BN)
            in_rows, in_columns = rows < M, columns < N
            x_rows = x + rows.to(tl.int64)[:, None] * x_stride
            weight_rows = weight + columns[None, :] * K
            acc = product_tile(x_rows, weight_rows, in_rows, in_columns, K, BM, BN, BK, WIDEN)
            target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(target, narrow(acc, DTYPE, WIDEN), mask=in_rows[:, None] & in_columns[None, :])
            tile += programs
        passed += tiles


def linear_batch(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Launch the kernel: [M_i, K_i] each -> [M_i, N_i] each, contiguous."""
    dtype, device = weights[0].dtype, weights[0].device
    rows = [x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous() for x in inputs]
    outputs = [torch.empty(len(x), len(w), dtype=dtype, device=device) for x, w in zip(rows, weights, strict=True)]
    fields = [
        [x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), len(weight), x.shape[1], x.stride(0)]
        for x, weight, out in zip(rows, weights, outputs, strict=True)
        if out.numel()
    ]
    if not fields:
        return tuple(outputs)
    # Told in elements, 8 of 16 bits; of wider types the kernel is told nothing.
    is_aligned = dtype.itemsize == 2 and all(
        number % _ALIGNMENT_BYTES == 0
        for x, weight, _, _, _, inner, stride in fields
        for number in (x, weight, inner * dtype.itemsize, stride * dtype.itemsize)
    )
    table = torch.tensor(fields, dtype=torch.int64, device=device)
    programs = num_programs(device)
    linear_batch_kernel[(programs,)](
        table,
        len(fields),
        programs,
        DTYPE=_TRITON_TYPES[dtype],
        FIELDS=_FIELDS,
        ALIGNED=is_aligned,
        WIDEN=interpreting(),
        **(_TILE if is_aligned else _UNALIGNED_TILE),
    )
    return tuple(outputs)


def _case(is_aligned: bool) -> AotCase:
    options = dict(_TILE if is_aligned else _UNALIGNED_TILE)
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    return AotCase(
        name=f"horizontal_linear.linear_batch.{'aligned' if is_aligned else 'unaligned'}",
        kernel=linear_batch_kernel,
        arguments={"table": "*i64", "num_problems": "i32", "programs": "i32"},
        constants=options | {"DTYPE": tl.bfloat16, "FIELDS": _FIELDS, "ALIGNED": is_aligned, "WIDEN": False},
        aligned=("table",),
        tensor_cores="hgmma",
        **launch,
    )


AOT_CASES = [_case(is_aligned=True), _case(is_aligned=False)]
