"""Triton kernels of broadcast_gemm: the request's part is gathered by row in the epilogue, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import Activation, interpreting
from kernels.gpu.lang import dot, jit, narrow, product_tile


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes and launch options."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


LARGE = Tile(128, 128, 64, 8, 3)
SMALL = Tile(64, 128, 64, 4, 4)
NARROW = Tile(64, 64, 64, 4, 4)
_NUM_SMS = 132
"""Of an H100 or H200: a grid with fewer large tiles than this leaves multiprocessors idle."""


def tile_for(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tile:
    """Choose the tile: large ones once there are enough of them to fill the device; float32 has no tensor core."""
    if dtype == torch.float32:
        return NARROW
    if triton.cdiv(num_rows, LARGE.m) * triton.cdiv(num_columns, LARGE.n) >= _NUM_SMS:
        return LARGE
    return SMALL if num_columns > NARROW.n else NARROW


@jit
def broadcast_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    part: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    C: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RELU: tl.constexpr,
    HAS_PART: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write act(x W^T + part[index]): x [C, K], weight [N, K], part float32 [B, N], index [C], out [C, N].

    Column tiles vary fastest, so that the programs that run together read the same rows of x.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    rows = (pid // tiles_n) * BM + tl.arange(0, BM)
    columns = (pid % tiles_n) * BN + tl.arange(0, BN)
    in_rows, in_columns = rows < C, columns < N
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + columns.to(tl.int64)[None, :] * weight_stride
    acc = product_tile(x_rows, weight_rows, in_rows, in_columns, K, BM, BN, BK, WIDEN)
    seen = in_rows[:, None] & in_columns[None, :]
    if HAS_PART:
        if HAS_INDEX:
            request = tl.load(index + rows, mask=in_rows, other=0).to(tl.int64)
            acc += tl.load(part + request[:, None] * N + columns[None, :], mask=seen, other=0.0)
        else:
            acc += tl.load(part + columns, mask=in_columns, other=0.0)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(target, narrow(acc, out.dtype.element_ty, WIDEN), mask=seen)


@jit
def broadcast_token_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    part: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    C: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    x_candidate: tl.tensor,
    x_token: tl.tensor,
    out_candidate: tl.tensor,
    out_token: tl.tensor,
    weight_stride: tl.tensor,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write W x_c + part[index[c]]: x [C, K, D] and out [C, M, D] by strides, weight [M, K], part float32 [B, M, D].

    Candidates and channels are one axis of columns, c * D + d, so a tile may hold several candidates, or a part of one.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    rows = (pid % tiles_m) * BM + tl.arange(0, BM)
    columns = (pid // tiles_m).to(tl.int64) * BN + tl.arange(0, BN)
    candidate, channel = columns // D, columns % D
    inner = tl.arange(0, BK)
    in_rows, in_columns = rows < M, candidate < C
    x_columns = x + candidate * x_candidate + channel
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        in_k = (k + inner) < K
        a = tl.load(
            weight + rows[:, None] * weight_stride + (k + inner)[None, :],
            mask=in_rows[:, None] & in_k[None, :],
            other=0.0,
        )
        b = tl.load(
            x_columns[None, :] + (k + inner).to(tl.int64)[:, None] * x_token,
            mask=in_k[:, None] & in_columns[None, :],
            other=0.0,
        )
        acc = dot(a, b, acc, WIDEN)
    seen = in_rows[:, None] & in_columns[None, :]
    part_columns = part + channel
    if HAS_INDEX:
        request = tl.load(index + candidate, mask=in_columns, other=0).to(tl.int64)
        part_columns += request * M * D
    acc += tl.load(part_columns[None, :] + rows[:, None] * D, mask=seen, other=0.0)
    target = out + candidate * out_candidate + channel
    tl.store(
        target[None, :] + rows.to(tl.int64)[:, None] * out_token, narrow(acc, out.dtype.element_ty, WIDEN), mask=seen
    )


def broadcast_gemm(
    x_CK: Tensor, weight_NK: Tensor, part_BN: Tensor, index_C: Tensor | None, activation: Activation
) -> Tensor:
    """Launch the row form; see ``BroadcastGemm``."""
    out_CN = torch.empty(len(x_CK), len(weight_NK), dtype=x_CK.dtype, device=x_CK.device)
    _launch(x_CK, weight_NK, part_BN.contiguous(), index_C, out_CN, activation)
    return out_CN


def request_part(x_BR: Tensor, weight_NR: Tensor) -> Tensor:
    """Launch the same kernel without a part, float32 out: [B, R] -> [B, N]."""
    out_BN = torch.empty(len(x_BR), len(weight_NR), dtype=torch.float32, device=x_BR.device)
    _launch(x_BR, weight_NR.contiguous(), None, None, out_BN, "none")
    return out_BN


def linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Launch the same kernel without a part: [M, K] -> [M, N], dtype of x."""
    out_MN = torch.empty(len(x_MK), len(weight_NK), dtype=x_MK.dtype, device=x_MK.device)
    _launch(x_MK, weight_NK, None, None, out_MN, "none")
    return out_MN


def _launch(
    x: Tensor, weight: Tensor, part: Tensor | None, index: Tensor | None, out: Tensor, activation: Activation
) -> None:
    num_rows, num_columns = out.shape
    if out.numel() == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = tile_for(num_rows, num_columns, x.dtype)
    grid = (triton.cdiv(num_rows, tile.m) * triton.cdiv(num_columns, tile.n),)
    broadcast_gemm_kernel[grid](
        x,
        weight,
        out if part is None else part,
        out if index is None else index,
        out,
        num_rows,
        num_columns,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        RELU=activation == "relu",
        HAS_PART=part is not None,
        HAS_INDEX=index is not None,
        WIDEN=interpreting(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def broadcast_token_gemm(x_CKD: Tensor, weight_MK: Tensor, part_BMD: Tensor, index_C: Tensor | None) -> Tensor:
    """Launch the token-axis form; see ``BroadcastTokenGemm``."""
    num_candidates, num_inputs, width = x_CKD.shape
    num_outputs = len(weight_MK)
    x_CKD = x_CKD if x_CKD.stride(2) == 1 else x_CKD.contiguous()
    if x_CKD.transpose(0, 1).is_contiguous():
        out_MCD = torch.empty(num_outputs, num_candidates, width, dtype=x_CKD.dtype, device=x_CKD.device)
        out_CMD = out_MCD.transpose(0, 1)
    else:
        out_CMD = torch.empty(num_candidates, num_outputs, width, dtype=x_CKD.dtype, device=x_CKD.device)
    if out_CMD.numel() == 0:
        return out_CMD
    tile = tile_for(num_outputs, num_candidates * width, x_CKD.dtype)
    grid = (triton.cdiv(num_outputs, tile.m) * triton.cdiv(num_candidates * width, tile.n),)
    broadcast_token_gemm_kernel[grid](
        x_CKD,
        weight_MK,
        part_BMD.contiguous(),
        out_CMD if index_C is None else index_C,
        out_CMD,
        num_candidates,
        num_outputs,
        num_inputs,
        x_CKD.stride(0),
        x_CKD.stride(1),
        out_CMD.stride(0),
        out_CMD.stride(1),
        weight_MK.stride(0),
        D=width,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        HAS_INDEX=index_C is not None,
        WIDEN=interpreting(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_CMD


def _cases() -> list[AotCase]:
    row = {"x": "*bf16", "weight": "*bf16", "part": "*fp32", "index": "*i32", "out": "*bf16"}
    sizes = dict.fromkeys(("C", "N", "K", "x_stride", "weight_stride"), "i32")
    token_sizes = ("C", "M", "K", "x_candidate", "x_token", "out_candidate", "out_token", "weight_stride")
    cases = []
    for label, tile in (("large", LARGE), ("small", SMALL), ("narrow", NARROW)):
        shape = {"BM": tile.m, "BN": tile.n, "BK": tile.k, "HAS_INDEX": True, "WIDEN": False}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        cases.append(
            AotCase(
                name=f"broadcast_gemm.{label}",
                kernel=broadcast_gemm_kernel,
                arguments=row | sizes,
                constants=shape | {"RELU": True, "HAS_PART": True},
                aligned=("x", "weight", "part", "index", "out", "N", "K", "x_stride", "weight_stride"),
                tensor_cores="hgmma",
                **options,
            )
        )
        cases.append(
            AotCase(
                name=f"broadcast_token_gemm.{label}",
                kernel=broadcast_token_gemm_kernel,
                arguments=row | dict.fromkeys(token_sizes, "i32"),
                constants=shape | {"D": 64},
                aligned=("x", "weight", "part", "index", "out", *token_sizes[2:]),
                tensor_cores="hgmma",
                **options,
            )
        )
    return cases


AOT_CASES = _cases()
