"""Triton kernel of fm_block: one program a candidate, its tokens read once, channel block by channel block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot.case import AotCase
from kernels.backends import interpreting
from kernels.gpu.lang import dot, jit, narrow

_CHANNELS = 64
"""Channels of one step. X_d enters both products of the step, so it is read once whatever D is."""


@jit
def fm_block_kernel(
    x: tl.tensor,
    y: tl.tensor,
    part: tl.tensor,
    index: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    D: tl.tensor,
    x_candidate: tl.tensor,
    x_token: tl.tensor,
    epsilon: tl.tensor,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    HAS_PART: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write the sum over channel blocks d of X_d (Y^T X_d + part_d)^T.

    x by strides, y [n, k], part float32 [B, k, D], index [C], gain [n * k], out [C, n, k].
    Padded tokens and mixtures are zero, so they add nothing to the products or to the mean square.
    """
    candidate = tl.program_id(0).to(tl.int64)
    tokens, mixtures, channels = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BD)
    in_n, in_k = tokens < n, mixtures < k
    y_kn = tl.load(y + tokens[None, :] * k + mixtures[:, None], mask=in_k[:, None] & in_n[None, :], other=0.0)
    x_rows = x + candidate * x_candidate + tokens.to(tl.int64)[:, None] * x_token
    request = candidate * 0
    if HAS_INDEX:
        request = tl.load(index + candidate).to(tl.int64)
    z = tl.zeros((BN, BK), tl.float32)
    for d in tl.range(0, D, BD):
        in_d = (d + channels) < D
        x_nd = tl.load(x_rows + (d + channels)[None, :], mask=in_n[:, None] & in_d[None, :], other=0.0)
        s_kd = dot(y_kn, x_nd, tl.zeros((BK, BD), tl.float32), WIDEN)
        if HAS_PART:
            rows = part + (request * k + mixtures[:, None]) * D + (d + channels)[None, :]
            s_kd += tl.load(rows, mask=in_k[:, None] & in_d[None, :], other=0.0)
        s_dk = tl.trans(narrow(s_kd, x.dtype.element_ty, WIDEN))
        z = dot(x_nd, s_dk, z, WIDEN)
    flat = tokens[:, None] * k + mixtures[None, :]
    seen = in_n[:, None] & in_k[None, :]
    if HAS_GAIN:
        mean_square = tl.sum(tl.sum(z * z, 1), 0) / (n * k)
        scale = tl.load(gain + flat, mask=seen, other=0.0).to(tl.float32)
        z = z * tl.rsqrt(mean_square + epsilon) * scale
    tl.store(out + candidate * n * k + flat, narrow(z, out.dtype.element_ty, WIDEN), mask=seen)


def _padded(size: int) -> int:
    # 16 is the least that a tensor-core product takes.
    return max(16, int(triton.next_power_of_2(size)))


def _num_warps(tokens: int, mixtures: int) -> int:
    # 32 accumulators a thread.
    return min(8, max(1, tokens * max(mixtures, 32) // 1024))


def fm_block(
    x_CnD: Tensor, y_nk: Tensor, part_BkD: Tensor | None, index_C: Tensor | None, gain: Tensor | None, epsilon: float
) -> Tensor:
    """Launch the kernel; see the facade."""
    num_candidates, num_tokens, width = x_CnD.shape
    num_mixtures = y_nk.shape[1]
    out_Cnk = torch.empty(num_candidates, num_tokens, num_mixtures, dtype=x_CnD.dtype, device=x_CnD.device)
    if out_Cnk.numel() == 0:
        return out_Cnk
    x_CnD = x_CnD if x_CnD.stride(2) == 1 else x_CnD.contiguous()
    tokens, mixtures = _padded(num_tokens), _padded(num_mixtures)
    fm_block_kernel[(num_candidates,)](
        x_CnD,
        y_nk.contiguous(),
        x_CnD if part_BkD is None else part_BkD.contiguous(),
        x_CnD if index_C is None else index_C,
        x_CnD if gain is None else gain,
        out_Cnk,
        num_tokens,
        num_mixtures,
        width,
        x_CnD.stride(0),
        x_CnD.stride(1),
        epsilon,
        BN=tokens,
        BK=mixtures,
        BD=min(_CHANNELS, _padded(width)),
        HAS_PART=part_BkD is not None,
        HAS_INDEX=index_C is not None,
        HAS_GAIN=gain is not None,
        WIDEN=interpreting(),
        num_warps=_num_warps(tokens, mixtures),
        num_stages=2,
    )
    return out_Cnk


def _case(num_tokens: int, num_mixtures: int) -> AotCase:
    tokens, mixtures = _padded(num_tokens), _padded(num_mixtures)
    pointers = {"x": "*bf16", "y": "*bf16", "part": "*fp32", "index": "*i32", "gain": "*bf16", "out": "*bf16"}
    sizes = dict.fromkeys(("n", "k", "D", "x_candidate", "x_token"), "i32")
    return AotCase(
        name=f"fm_block.{num_tokens}x{num_mixtures}",
        kernel=fm_block_kernel,
        arguments=pointers | sizes | {"epsilon": "fp32"},
        constants={
            "BN": tokens,
            "BK": mixtures,
            "BD": _CHANNELS,
            "HAS_PART": True,
            "HAS_INDEX": True,
            "HAS_GAIN": True,
            "WIDEN": False,
        },
        aligned=(*pointers, *sizes),
        num_warps=_num_warps(tokens, mixtures),
        num_stages=2,
        tensor_cores="hgmma" if tokens >= 128 else "hmma",
    )


AOT_CASES = [_case(16, 8), _case(32, 16), _case(64, 32), _case(256, 64)]
