"""Triton kernels of lowp_linear: RMS norm and quantize of a row in one pass, and the row-wise scaled FP8 product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import jit, narrow, narrow_e4m3
from kernels.lowp_linear.formats import E4M3_MAX, Quantized

_ELEMENTS = 4096
"""Of one program of the quantizer: several short rows, or one long one."""
_INPUTS_MAX = 32_768
_BM, _BN, _BK = 128, 128, 128
_FEW_ROWS = 64


@jit
def quantize_fp8_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    epsilon: tl.tensor,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write e4m3 values [M, K] and float32 scales [M] of x, or of its RMS norm times the gain."""
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BK)
    in_rows, in_columns = rows < M, columns < K
    seen = in_rows[:, None] & in_columns[None, :]
    row = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=seen, other=0.0).to(tl.float32)
    if HAS_GAIN:
        mean_square = tl.sum(row * row, 1) / K
        row = row * tl.rsqrt(mean_square + epsilon)[:, None]
        row = row * tl.load(gain + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    most = tl.max(tl.abs(row), 1)
    # Divisions as IEEE rounds them: the values have the bits of the reference.
    scale = tl.where(most > 0.0, tl.maximum(tl.div_rn(most, tl.full((BM,), LARGEST, tl.float32)), TINY), 1.0)
    narrowed = narrow_e4m3(tl.div_rn(row, tl.broadcast_to(scale[:, None], (BM, BK))), WIDEN)
    tl.store(values + rows.to(tl.int64)[:, None] * K + columns[None, :], narrowed, mask=seen)
    tl.store(scales + rows, scale, mask=in_rows)


@jit
def multiply_fp8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write (x W^T) * x_scales * weight_scales: x e4m3 [M, K], weight e4m3 [N, K], out [M, N].

    Hopper's FP8 tensor cores keep 14 bits of their sums; every BK inputs they are added to a float32 accumulator.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    rows = (pid // tiles_n) * BM + tl.arange(0, BM)
    columns = (pid % tiles_n) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    in_rows, in_columns = rows < M, columns < N
    x_rows = x + rows.to(tl.int64)[:, None] * K
    weight_rows = weight + columns.to(tl.int64)[None, :] * K
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        in_k = (k + inner) < K
        a = tl.load(x_rows + (k + inner)[None, :], mask=in_rows[:, None] & in_k[None, :], other=0.0)
        b = tl.load(weight_rows + (k + inner)[:, None], mask=in_k[:, None] & in_columns[None, :], other=0.0)
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=BK)
    acc *= tl.load(x_scales + rows, mask=in_rows, other=0.0)[:, None]
    acc *= tl.load(weight_scales + columns, mask=in_columns, other=0.0)[None, :]
    target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(target, narrow(acc, out.dtype.element_ty, WIDEN), mask=in_rows[:, None] & in_columns[None, :])


def quantize_fp8(x_MK: Tensor, gain_K: Tensor | None, epsilon: float) -> Quantized:
    """Launch the quantizer, after an RMS norm if there is a gain.

    Raises:
        ValueError: a row is longer than one program takes.
    """
    num_rows, num_inputs = x_MK.shape
    if num_inputs > _INPUTS_MAX:
        raise ValueError(f"K of backend 'triton' must be at most {_INPUTS_MAX}, is {num_inputs}")
    values = torch.empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x_MK.device)
    if num_rows == 0:
        return Quantized(values, scales, "fp8_rowwise")
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    options = _quantize_options(num_inputs)
    quantize_fp8_kernel[(triton.cdiv(num_rows, options["BM"]),)](
        x_MK,
        x_MK if gain_K is None else gain_K,
        values,
        scales,
        num_rows,
        num_inputs,
        x_MK.stride(0),
        epsilon,
        LARGEST=E4M3_MAX,
        TINY=torch.finfo(torch.float32).tiny,
        HAS_GAIN=gain_K is not None,
        WIDEN=interpreting(),
        **options,
    )
    return Quantized(values, scales, "fp8_rowwise")


def multiply_fp8(rows: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Launch the scaled product: [M, K] and [N, K] -> [M, N]."""
    num_rows, num_inputs = rows.values.shape
    num_outputs = len(weight.values)
    out_MN = torch.empty(num_rows, num_outputs, dtype=dtype, device=rows.values.device)
    if out_MN.numel() == 0:
        return out_MN
    options = _multiply_options(num_rows)
    multiply_fp8_kernel[(triton.cdiv(num_rows, options["BM"]) * triton.cdiv(num_outputs, options["BN"]),)](
        rows.values.contiguous(),
        weight.values,
        rows.scales,
        weight.scales,
        out_MN,
        num_rows,
        num_outputs,
        num_inputs,
        WIDEN=interpreting(),
        **options,
    )
    return out_MN


def _quantize_options(num_inputs: int) -> dict[str, int]:
    columns = max(16, int(triton.next_power_of_2(num_inputs)))
    return {"BM": max(1, _ELEMENTS // columns), "BK": columns, "num_warps": max(4, min(16, columns // 1024))}


def _multiply_options(num_rows: int) -> dict[str, int]:
    rows = _BM if num_rows > _FEW_ROWS else _FEW_ROWS
    return {"BM": rows, "BN": _BN, "BK": _BK, "num_warps": rows // 16, "num_stages": 3}


def _quantize_case(num_inputs: int, has_gain: bool) -> AotCase:
    options = _quantize_options(num_inputs)
    return AotCase(
        name=f"lowp_linear.{'rms_norm_' if has_gain else ''}quantize_fp8.{num_inputs}",
        kernel=quantize_fp8_kernel,
        arguments={
            "x": "*bf16",
            "gain": "*bf16",
            "values": "*fp8e4nv",
            "scales": "*fp32",
            "M": "i32",
            "K": "i32",
            "x_stride": "i32",
            "epsilon": "fp32",
        },
        constants={
            "LARGEST": E4M3_MAX,
            "TINY": torch.finfo(torch.float32).tiny,
            "BM": options["BM"],
            "BK": options["BK"],
            "HAS_GAIN": has_gain,
            "WIDEN": False,
        },
        aligned=("x", "gain", "values", "scales", "K", "x_stride"),
        num_warps=options["num_warps"],
    )


def _multiply_case(num_rows: int) -> AotCase:
    options = _multiply_options(num_rows)
    pointers = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scales": "*fp32", "weight_scales": "*fp32", "out": "*bf16"}
    return AotCase(
        name=f"lowp_linear.multiply_fp8.{options['BM']}",
        kernel=multiply_fp8_kernel,
        arguments=pointers | {"M": "i32", "N": "i32", "K": "i32"},
        constants={"BM": options["BM"], "BN": options["BN"], "BK": options["BK"], "WIDEN": False},
        aligned=(*pointers, "N", "K"),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        tensor_cores="qgmma",
    )


AOT_CASES = [
    _quantize_case(1024, False),
    _quantize_case(1024, True),
    _quantize_case(_INPUTS_MAX, True),
    _multiply_case(_FEW_ROWS),
    _multiply_case(_BM),
]
