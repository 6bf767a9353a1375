"""Triton kernels of jagged_norm: rows in one pass; sequences in two, the sums of squares first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import jit, narrow

_ELEMENTS = 4_096
"""Entries that one program holds: rows of D padded to a power of two."""


@jit
def row_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    squares: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    B: tl.tensor,
    epsilon: tl.tensor,
    BM: tl.constexpr,
    BD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_FIRST_OF_TWO: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Norm BM rows: x, residual, total and out [T, D], ends [B + 1]; rows from ``ends[B]`` on are padding.

    As the first of two passes it writes each row's sum of squares, float32 [T], instead of the norm.
    """
    rows, width = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    num_rows = tl.load(ends + B).to(tl.int32)
    inside = (rows < T)[:, None] & (width < D)[None, :]
    at = rows.to(tl.int64)[:, None] * D + width[None, :]
    stored = tl.load(x + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        wide = stored.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = narrow(wide, x.dtype.element_ty, WIDEN)
        tl.store(total + at, stored, mask=inside)
    value = tl.where((rows < num_rows)[:, None], stored.to(tl.float32), 0.0)
    square = tl.sum(value * value, 1)
    if IS_FIRST_OF_TWO:
        tl.store(squares + rows, square, mask=rows < T)
    else:
        scale = tl.load(gain + width, mask=width < D, other=0.0).to(tl.float32)
        normed = value * tl.rsqrt(square / D + epsilon)[:, None] * scale[None, :]
        tl.store(out + at, narrow(normed, out.dtype.element_ty, WIDEN), mask=inside)


@jit
def sequence_norm_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    squares: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    D: tl.tensor,
    epsilon: tl.tensor,
    BM: tl.constexpr,
    BD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Norm one sequence by the mean of all its squares: x and out [T, D], squares float32 [T], ends [B + 1]."""
    sequence = tl.program_id(0)
    first, last = tl.load(ends + sequence).to(tl.int32), tl.load(ends + sequence + 1).to(tl.int32)
    steps, width = tl.arange(0, BM), tl.arange(0, BD)
    sums = tl.zeros((BM,), tl.float32)
    for t in tl.range(first, last, BM):
        sums += tl.load(squares + t + steps, mask=(t + steps) < last, other=0.0)
    factor = tl.rsqrt(tl.sum(sums, 0) / (tl.maximum(last - first, 1) * D) + epsilon)
    scale = tl.load(gain + width, mask=width < D, other=0.0).to(tl.float32)
    for t in tl.range(first, last, BM):
        inside = ((t + steps) < last)[:, None] & (width < D)[None, :]
        at = (t + steps).to(tl.int64)[:, None] * D + width[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, narrow(value * factor * scale[None, :], out.dtype.element_ty, WIDEN), mask=inside)


def jagged_norm(
    x_TD: Tensor, gain_D: Tensor, offsets: Tensor, residual_TD: Tensor | None, over: str, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Launch the kernels; see the facade."""
    x_TD, gain_D, ends = x_TD.contiguous(), gain_D.contiguous(), offsets.int()
    num_rows, width = x_TD.shape
    total = x_TD if residual_TD is None else torch.empty_like(x_TD)
    by_row = over == "row"
    out = torch.empty_like(x_TD) if by_row else torch.zeros_like(x_TD)
    if x_TD.numel() == 0:
        return total, out
    squares = x_TD if by_row else torch.empty(num_rows, dtype=torch.float32, device=x_TD.device)
    sizes = _sizes(width)
    row_norm_kernel[(triton.cdiv(num_rows, sizes["BM"]),)](
        x_TD,
        x_TD if residual_TD is None else residual_TD.contiguous(),
        gain_D,
        squares,
        total,
        out,
        ends,
        num_rows,
        width,
        len(ends) - 1,
        epsilon,
        **sizes,
        HAS_RESIDUAL=residual_TD is not None,
        IS_FIRST_OF_TWO=not by_row,
        WIDEN=interpreting(),
    )
    if not by_row and len(ends) > 1:
        sequence_norm_kernel[(len(ends) - 1,)](
            total, gain_D, squares, out, ends, width, epsilon, **sizes, WIDEN=interpreting()
        )
    return total, out


def _sizes(width: int) -> dict[str, int]:
    padded = max(16, int(triton.next_power_of_2(width)))
    return {"BM": max(1, _ELEMENTS // padded), "BD": padded}


def _row_case(width: int, residual: bool) -> AotCase:
    pointers = dict.fromkeys(("x", "residual", "gain", "total", "out"), "*bf16") | {"squares": "*fp32", "ends": "*i32"}
    order = ("x", "residual", "gain", "squares", "total", "out", "ends")
    return AotCase(
        name=f"jagged_norm.row.{width}{'.residual' if residual else ''}",
        kernel=row_norm_kernel,
        arguments={name: pointers[name] for name in order}
        | dict.fromkeys(("T", "D", "B"), "i32")
        | {"epsilon": "fp32"},
        constants=_sizes(width) | {"HAS_RESIDUAL": residual, "IS_FIRST_OF_TWO": False, "WIDEN": False},
        aligned=(*order, "D"),
    )


def _sequence_case(width: int) -> AotCase:
    pointers = {"x": "*bf16", "gain": "*bf16", "squares": "*fp32", "out": "*bf16", "ends": "*i32"}
    return AotCase(
        name=f"jagged_norm.sequence.{width}",
        kernel=sequence_norm_kernel,
        arguments=pointers | {"D": "i32", "epsilon": "fp32"},
        constants=_sizes(width) | {"WIDEN": False},
        aligned=(*pointers, "D"),
    )


AOT_CASES = [_row_case(64, False), _row_case(512, True), _sequence_case(128)]
