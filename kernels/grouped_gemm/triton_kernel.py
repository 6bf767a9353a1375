"""Triton kernel of grouped_gemm: persistent programs walk the tiles of all groups; offsets are read on the device."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import jit, narrow, product_tile
from kernels.gpu.launch import num_programs

_TILES = {
    "wide": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
    "narrow": {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4},
}


@jit
def grouped_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    offsets: tl.tensor,
    G: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    num_programs: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write rows offsets[g]:offsets[g + 1] of x [T, K] times weight[g] [N, K] transposed to out [T, N].

    Program p takes tiles p, p + num_programs, ..; column tiles of one row tile are neighbours and share its rows.
    """
    tile = tl.program_id(0)
    passed = 0
    tiles_n = tl.cdiv(N, BN)
    for group in tl.range(0, G):
        begin = tl.load(offsets + group).to(tl.int32)
        end = tl.load(offsets + group + 1).to(tl.int32)
        tiles = tl.cdiv(end - begin, BM) * tiles_n
        # Not weight + group * ..: the interpreter's loop variable is a Python number and has no type.
        weight_group = weight + (tl.zeros((), tl.int64) + group) * N * K
        while tile < passed + tiles:
            local = tile - passed
            rows = begin + (local // tiles_n) * BM + tl.arange(0, BM)
            columns = (local % tiles_n) * BN + tl.arange(0, BN)
            in_rows, in_columns = rows < end, columns < N
            x_rows = x + rows.to(tl.int64)[:, None] * K
            weight_rows = weight_group + columns[None, :] * K
            acc = product_tile(x_rows, weight_rows, in_rows, in_columns, K, BM, BN, BK, WIDEN)
            target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(target, narrow(acc, out.dtype.element_ty, WIDEN), mask=in_rows[:, None] & in_columns[None, :])
            tile += num_programs
        passed += tiles


def grouped_gemm(x_TK: Tensor, weight_GNK: Tensor, offsets: Tensor) -> Tensor:
    """Launch the kernel; see the facade."""
    num_groups, num_outputs, num_inputs = weight_GNK.shape
    out_TN = torch.empty(len(x_TK), num_outputs, dtype=x_TK.dtype, device=x_TK.device)
    if out_TN.numel() == 0:
        return out_TN
    programs = num_programs(x_TK.device)
    options = _options(len(x_TK), num_groups, num_outputs)
    grouped_gemm_kernel[(programs,)](
        x_TK.contiguous(),
        weight_GNK.contiguous(),
        out_TN,
        offsets,
        num_groups,
        num_outputs,
        num_inputs,
        programs,
        WIDEN=interpreting(),
        **options,
    )
    return out_TN


def _options(num_rows: int, num_groups: int, num_outputs: int) -> dict[str, int]:
    """Choose the tile by the mean group: lengths are on the device, and asking for them would wait for it."""
    is_narrow = num_rows < num_groups * 128 or num_outputs <= 64
    return _TILES["narrow" if is_narrow else "wide"]


def _case(label: str) -> AotCase:
    options = dict(_TILES[label])
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    pointers = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "offsets": "*i32"}
    return AotCase(
        name=f"grouped_gemm.{label}",
        kernel=grouped_gemm_kernel,
        arguments=pointers | dict.fromkeys(("G", "N", "K", "num_programs"), "i32"),
        constants=options | {"WIDEN": False},
        aligned=(*pointers, "N", "K"),
        tensor_cores="hgmma",
        **launch,
    )


AOT_CASES = [_case(label) for label in _TILES]
