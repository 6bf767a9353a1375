"""The checks: every Triton kernel over a grid of odd, empty and real shapes, each with its torch form and its costs.

All in bfloat16, as ranking runs on a GPU, but two float32 products that show that those are not made in TF32; float32
forms of the others are right, and too slow to compile and to run to be of use on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_gemm import BroadcastGemm, BroadcastTokenGemm
from kernels.fm_block import fm_block
from kernels.gpu_check.check import Check, Prepared
from kernels.gpu_check.jagged_cases import jagged_checks
from kernels.gpu_check.more_cases import grouped_checks, horizontal_checks, lowp_checks, topk_checks
from kernels.roofline import counts
from kernels.tolerance import tolerance

BF16, FP32 = torch.bfloat16, torch.float32


def all_checks() -> list[Check]:
    """Return every check, small ones of an operator before its real shapes.

    The real ones: the broadcast layers of the In-Kernel Broadcast blog (1,024 candidates, 433 tokens), a first layer, a
    request of 1,000 candidates over 2,048 events, the projections of 100 features.
    """
    return [
        *_gemm_checks(),
        *_token_checks(),
        *_fm_checks(),
        *_attention_checks(),
        *lowp_checks(),
        *grouped_checks(),
        *horizontal_checks(),
        *topk_checks(),
        *jagged_checks(),
    ]


def index_of(num_candidates: int, num_requests: int, device: torch.device) -> Tensor | None:
    """Return a request for each candidate in no order, int32; None for one request."""
    if num_requests == 1:
        return None
    return torch.randint(0, num_requests, (num_candidates,), device=device, dtype=torch.int32)


def _rows_of(index: Tensor | None, num_candidates: int, device: torch.device) -> Tensor:
    return torch.zeros(num_candidates, dtype=torch.int64, device=device) if index is None else index.long()


def _gemm_checks() -> list[Check]:
    small = [(1, 1, 1, 1, 1, FP32), (33, 65, 70, 19, 3, BF16), (0, 17, 8, 8, 2, BF16), (200, 300, 129, 8, 70, FP32)]
    large = [(1000, 1024, 256, 1024, 1, BF16), (4000, 1024, 512, 4096, 8, BF16), (100, 1024, 256, 1024, 1, BF16)]
    return [
        Check("broadcast_gemm", f"C{c} N{n} K{k} R{r} B{b} {_label(dtype)}",
              partial(_gemm, (c, n, k, r, b), dtype), is_timed=(c, n, k, r, b, dtype) in large,
              work=counts.broadcast_gemm(c, n, k, r, b, _label(dtype)))
        for c, n, k, r, b, dtype in small + large
    ]  # fmt: skip


def _gemm(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> Prepared:
    num_candidates, num_outputs, num_inputs, num_request_inputs, num_requests = sizes
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
    request_weight = torch.randn(num_outputs, num_request_inputs, device=device, dtype=dtype)
    x = torch.randn(num_candidates, num_inputs, device=device, dtype=dtype)
    request = torch.randn(num_requests, num_request_inputs, device=device, dtype=dtype)
    index = index_of(num_candidates, num_requests, device)
    rows = _rows_of(index, num_candidates, device)
    op = BroadcastGemm(weight, request_weight, activation="relu", backend="triton")
    both = torch.cat([weight, request_weight], 1)

    def expected() -> tuple[Tensor, Tensor]:
        inputs = torch.cat([x, request[rows]], 1).double()
        return (inputs @ both.double().T).relu(), inputs.abs() @ both.double().abs().T

    return Prepared(
        fused=lambda: op(x, op.request_part(request), index),
        unfused=lambda: functional.relu(functional.linear(torch.cat([x, request[rows]], 1), both)),
        expected=expected,
        tolerance=tolerance(dtype, num_inputs + num_request_inputs),
    )


def _token_checks() -> list[Check]:
    small = [(1, 1, 1, 1, 16, 1, BF16), (7, 9, 35, 11, 32, 3, BF16), (40, 70, 33, 20, 24, 2, BF16)]
    large = [(1024, 433, 872, 1184, 256, 15, BF16), (1000, 16, 32, 96, 64, 1, BF16)]
    return [
        Check("broadcast_token_gemm", f"C{c} M{m} K{k} R{r} D{d} B{b} {_label(dtype)}",
              partial(_token, (c, m, k, r, d, b), dtype), is_timed=(c, m, k, r, d, b, dtype) in large,
              work=counts.broadcast_token_gemm(c, m, k, r, d, b))
        for c, m, k, r, d, b, dtype in small + large
    ]  # fmt: skip


def _token(sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> Prepared:
    num_candidates, num_outputs, num_inputs, num_request_inputs, width, num_requests = sizes
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
    request_weight = torch.randn(num_outputs, num_request_inputs, device=device, dtype=dtype)
    x = torch.randn(num_candidates, num_inputs, width, device=device, dtype=dtype)
    request = torch.randn(num_requests, num_request_inputs, width, device=device, dtype=dtype)
    index = index_of(num_candidates, num_requests, device)
    rows = _rows_of(index, num_candidates, device)
    op = BroadcastTokenGemm(weight, request_weight, backend="triton")
    both = torch.cat([weight, request_weight], 1)

    def expected() -> tuple[Tensor, Tensor]:
        inputs = torch.cat([x, request[rows]], 1).double()
        return both.double() @ inputs, both.double().abs() @ inputs.abs()

    return Prepared(
        fused=lambda: op(x, op.request_part(request), index),
        unfused=lambda: torch.matmul(both, torch.cat([x, request[rows]], 1)),
        expected=expected,
        tolerance=tolerance(dtype, num_inputs + num_request_inputs),
    )


def _fm_checks() -> list[Check]:
    small = [(1, 1, 1, 1, 1, BF16), (5, 17, 7, 33, 2, BF16), (2, 70, 33, 130, 2, BF16), (3, 256, 64, 40, 1, BF16)]
    large = [(1000, 32, 16, 64, 1, BF16), (4000, 16, 8, 128, 8, BF16)]
    return [
        Check("fm_block", f"C{c} n{n} k{k} D{d} B{b} {_label(dtype)}",
              partial(_fm, (c, n, k, d, b), dtype), is_timed=(c, n, k, d, b, dtype) in large,
              work=counts.fm_block(c, n, k, d, b))
        for c, n, k, d, b, dtype in small + large
    ]  # fmt: skip


def _fm(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> Prepared:
    num_candidates, num_tokens, num_mixtures, width, num_requests = sizes
    x = torch.randn(num_candidates, num_tokens, width, device=device, dtype=dtype)
    y = torch.randn(num_tokens, num_mixtures, device=device, dtype=dtype)
    part = torch.randn(num_requests, num_mixtures, width, device=device)
    gain = torch.randn(num_tokens * num_mixtures, device=device, dtype=dtype)
    index = index_of(num_candidates, num_requests, device)
    rows = _rows_of(index, num_candidates, device)

    def expected() -> tuple[Tensor, Tensor]:
        wide, mix, mine = x.double(), y.double(), part.double()[rows].mT
        out = wide @ (wide.mT @ mix + mine)
        size = wide.abs() @ (wide.abs().mT @ mix.abs() + mine.abs())
        scale = torch.rsqrt(out.square().mean((1, 2), keepdim=True) + 1e-6) * gain.double().view(y.shape)
        return out * scale, size * scale.abs()

    def unfused() -> Tensor:
        products = torch.bmm(x, (torch.matmul(y.T, x) + part.to(dtype)[rows]).transpose(1, 2))
        return functional.rms_norm(products.flatten(1), gain.shape, gain, 1e-6).view(products.shape)

    return Prepared(
        fused=lambda: fm_block(x, y, part, index, gain=gain, backend="triton"),
        unfused=unfused,
        expected=expected,
        tolerance=tolerance(dtype, num_tokens + width, roundings=3),
    )


def _attention_checks() -> list[Check]:
    small = [(1, 1, 1, 16, (1,), BF16), (7, 3, 2, 24, (65, 0, 1, 130), BF16), (50, 2, 1, 128, (0, 90), BF16)]
    large = [(1000, 4, 2, 64, (2048,), BF16), (2048, 64, 2, 128, (1024,) * 32, BF16), (100, 4, 2, 64, (2048,), BF16)]
    return [
        Check("broadcast_attention", f"{activation} C{c} Q{q} H{h} K{k} B{len(t)} T{max(t)} {_label(dtype)}",
              partial(_attention, (c, q, h, k), t, dtype, activation), is_timed=(c, q, h, k, t, dtype) in large,
              work=counts.broadcast_attention(c, q, h, k, t))
        for activation in ("softmax", "silu")
        for c, q, h, k, t, dtype in small + large
    ]  # fmt: skip


def _attention(
    sizes: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    activation: str,
    device: torch.device,
) -> Prepared:
    num_candidates, num_queries, num_heads, width = sizes
    is_softmax = activation == "softmax"
    scale = width**-0.5 if is_softmax else 1 / max(lengths)
    q = torch.randn(num_candidates, num_queries, num_heads, width, device=device, dtype=dtype)
    k, v = (torch.randn(sum(lengths), num_heads, width, device=device, dtype=dtype) for _ in range(2))
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    index = index_of(num_candidates, len(lengths), device)
    rows = _rows_of(index, num_candidates, device)

    def weights_of(scores: Tensor) -> Tensor:
        return torch.softmax(scores * scale, -1) if is_softmax else functional.silu(scores) * scale

    def expected() -> tuple[Tensor, Tensor]:
        out, size = (torch.zeros(q.shape, device=device, dtype=torch.float64) for _ in range(2))
        for request, (keys, values) in enumerate(zip(*(torch.split(x, list(lengths)) for x in (k, v)), strict=True)):
            mine = torch.nonzero(rows == request)[:, 0]
            # In pieces: the scores of all candidates in float64 would take gigabytes.
            for some in torch.split(mine, 64):
                weights = weights_of(torch.einsum("cqhk,thk->cqht", q[some].double(), keys.double()))
                out[some] = torch.einsum("cqht,thk->cqhk", weights, values.double())
                size[some] = torch.einsum("cqht,thk->cqhk", weights.abs(), values.double().abs())
        return out, size

    def unfused() -> Tensor:
        # Keys and values copied to every candidate, as a model without the kernel does; equal lengths only.
        shape = (len(lengths), lengths[0], num_heads, width)
        keys, values = (x.view(shape)[rows].transpose(1, 2) for x in (k, v))
        queries = q.transpose(1, 2)
        if is_softmax:
            return functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
        return torch.matmul(weights_of(torch.matmul(queries, keys.mT)), values).transpose(1, 2)

    # exp moves a weight by as much as its score is wrong, and scores here stay below about 6 (softmax) by magnitude.
    return Prepared(
        fused=lambda: broadcast_attention(
            q, k, v, ends, index, activation="softmax" if is_softmax else "silu", scale=scale, backend="triton"
        ),
        unfused=unfused,
        expected=expected,
        tolerance=tolerance(dtype, 36 * (width + max(lengths)), roundings=3),
    )


def _label(dtype: torch.dtype) -> Literal["bf16", "fp32"]:
    return "bf16" if dtype == BF16 else "fp32"
