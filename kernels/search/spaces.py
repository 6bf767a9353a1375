"""Search spaces of this package's operators: per operator, the ways to compute it and the shapes that ranking asks for.

The first variant of each problem is the plain one, without sharing, packing or fusion: what a search must at least
equal, and what a benchmark compares with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import Backend, BackendUnavailableError
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_gemm import BroadcastGemm
from kernels.fm_block import fm_block
from kernels.grouped_gemm import grouped_gemm
from kernels.lowp_linear import LowpLinear
from kernels.packed_linear import PackedLinear
from kernels.roofline import Precision, counts
from kernels.search.problem import Inputs, Problem, Solve, UnavailableVariantError, Variant
from kernels.tolerance import tolerance

INT8_ERROR = 0.03
"""Relative error that one symmetric int8 product may have: rounding to 1/127 of a row's maximum, on Gaussian rows."""


def broadcast_gemm_problem(num_candidates: int, user: int, candidate: int, hidden: int, dtype: torch.dtype) -> Problem:
    """Return relu(W [u; c]) for one request; the request's half is part of the call."""
    weight_NK, request_NR = _random(hidden, candidate, 1), _random(hidden, user, 2)
    scale = (candidate + user) ** -0.5
    weight_NK, request_NR = (weight_NK * scale).to(dtype), (request_NR * scale).to(dtype)

    def inputs(seed: int) -> Inputs:
        return _random(num_candidates, candidate, seed).to(dtype), _random(1, user, seed + 1).to(dtype)

    def concatenated() -> Solve:
        packed = PackedLinear(torch.cat([request_NR, weight_NK], dim=1))
        return lambda x, u: packed(torch.cat([u.expand(len(x), -1), x], dim=1), None, "relu")

    def split(backend: Backend) -> Callable[[], Solve]:
        def build() -> Solve:
            gemm = BroadcastGemm(weight_NK, request_NR, activation="relu", backend=backend)
            return lambda x, u: gemm(x, gemm.request_part(u))

        return _here(build)

    def truth(x: Tensor, u: Tensor) -> Tensor:
        return functional.relu(x.float() @ weight_NK.float().T + u.float() @ request_NR.float().T)

    return Problem(
        "broadcast_gemm",
        {"candidates": num_candidates, "user": user, "candidate": candidate, "hidden": hidden},
        _name(dtype), inputs, truth, 4.0 * tolerance(dtype, candidate + user, 2),
        [Variant("concatenated", concatenated), Variant("torch", split("torch")), Variant("native", split("native"))],
        counts.broadcast_gemm(num_candidates, hidden, candidate, user, 1, _precision(dtype)),
    )  # fmt: skip


def broadcast_attention_problem(
    num_candidates: int, num_queries: int, num_keys: int, num_heads: int, head_width: int, dtype: torch.dtype
) -> Problem:
    """Return attention of all candidates of one request to its history."""

    def inputs(seed: int) -> Inputs:
        q = _random(num_candidates, num_queries * num_heads * head_width, seed).to(dtype)
        k, v = (_random(num_keys, num_heads * head_width, seed + each).to(dtype) for each in (1, 2))
        heads = (num_heads, head_width)
        return q.view(num_candidates, num_queries, *heads), k.view(1, num_keys, *heads), v.view(1, num_keys, *heads)

    def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with a copy of the history for each candidate."""
        queries = q.transpose(1, 2)
        keys, values = (x.expand(len(q), -1, -1, -1).transpose(1, 2).contiguous() for x in (k, v))
        return functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)

    def shared(backend: Backend) -> Callable[[], Solve]:
        return _here(lambda: lambda q, k, v: broadcast_attention(q, k, v, backend=backend))

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return broadcast_attention(q.float(), k.float(), v.float(), backend="reference")

    return Problem(
        "broadcast_attention",
        {
            "candidates": num_candidates, "queries": num_queries, "keys": num_keys, "heads": num_heads,
            "head_width": head_width,
        },
        _name(dtype), inputs, truth, 4.0 * tolerance(dtype, num_keys, 3),
        [Variant("expanded", lambda: expanded), Variant("torch", shared("torch")), Variant("native", shared("native"))],
        counts.broadcast_attention(num_candidates, num_queries, num_heads, head_width, (num_keys,), _precision(dtype)),
    )  # fmt: skip


def fm_block_problem(num_candidates: int, num_tokens: int, width: int, mixtures: int, dtype: torch.dtype) -> Problem:
    """Return the normed factorization-machine block X (X^T Y)."""
    gain = torch.ones(num_tokens * mixtures, dtype=dtype)

    def inputs(seed: int) -> Inputs:
        x = _random(num_candidates, num_tokens * width, seed).to(dtype).view(num_candidates, num_tokens, width)
        return x, (_random(num_tokens, mixtures, seed + 1) * num_tokens**-0.5).to(dtype)

    def square(x: Tensor, y: Tensor) -> Tensor:
        """Make the n x n products first, as the plain factorization machine does."""
        products = torch.matmul(torch.bmm(x, x.transpose(1, 2)), y).flatten(1)
        return functional.rms_norm(products, gain.shape, gain, 1e-6).view(len(x), num_tokens, mixtures)

    def truth(x: Tensor, y: Tensor) -> Tensor:
        return fm_block(x.float(), y.float(), gain=gain.float(), backend="reference")

    def of(backend: Backend) -> Callable[[], Solve]:
        return _here(lambda: lambda x, y: fm_block(x, y, gain=gain, backend=backend))

    return Problem(
        "fm_block",
        {"candidates": num_candidates, "tokens": num_tokens, "width": width, "mixtures": mixtures},
        _name(dtype), inputs, truth, 16.0 * tolerance(dtype, num_tokens * width, 3),
        [Variant("square", lambda: square), Variant("torch", of("torch"))],
        counts.fm_block(num_candidates, num_tokens, mixtures, width, 0, _precision(dtype)),
    )  # fmt: skip


def grouped_gemm_problem(num_groups: int, rows: int, width: int, dtype: torch.dtype) -> Problem:
    """Return many small products of equal size, as per-feature projections are."""
    weight_GNK = (_random(num_groups * width, width, 3) * width**-0.5).to(dtype).view(num_groups, width, width)
    offsets = torch.arange(num_groups + 1, dtype=torch.int32) * rows

    def inputs(seed: int) -> Inputs:
        return (_random(num_groups * rows, width, seed).to(dtype),)

    def loop(x: Tensor) -> Tensor:
        parts = zip(x.chunk(num_groups), weight_GNK, strict=True)
        return torch.cat([functional.linear(part, weight) for part, weight in parts])

    def packed_loop() -> Solve:
        layers = [PackedLinear(weight) for weight in weight_GNK]
        return lambda x: torch.cat([layer(part) for layer, part in zip(layers, x.chunk(num_groups), strict=True)])

    def batched(x: Tensor) -> Tensor:
        out: Tensor = torch.bmm(x.view(num_groups, rows, width), weight_GNK.transpose(1, 2)).view(-1, width)
        return out

    def truth(x: Tensor) -> Tensor:
        return grouped_gemm(x.float(), weight_GNK.float(), offsets, backend="reference")

    return Problem(
        "grouped_gemm",
        {"groups": num_groups, "rows": rows, "width": width},
        _name(dtype), inputs, truth, 4.0 * tolerance(dtype, width),
        [
            Variant("loop", lambda: loop),
            Variant("packed_loop", packed_loop),
            Variant("batched", lambda: batched),
            Variant("torch", _here(lambda: lambda x: grouped_gemm(x, weight_GNK, offsets, backend="torch"))),
        ],
        counts.grouped_gemm((rows,) * num_groups, width, width, _precision(dtype)),
    )  # fmt: skip


def linear_problem(rows: int, inputs_: int, outputs: int, error: float | None = None) -> Problem:
    """Return one linear map in any number format whose error is allowed.

    Args:
        rows: M.
        inputs_: K.
        outputs: N.
        error: Largest error relative to the largest output; None: that of bfloat16, which int8 does not meet.
    """
    weight = _random(outputs, inputs_, 5) * inputs_**-0.5

    def inputs(seed: int) -> Inputs:
        return (_random(rows, inputs_, seed).bfloat16(),)

    def plain() -> Solve:
        of_dtype = weight.bfloat16()
        return lambda x: functional.linear(x, of_dtype)

    def packed(dtype: torch.dtype) -> Callable[[], Solve]:
        def build() -> Solve:
            layer = PackedLinear(weight.to(dtype))
            return lambda x: layer(x.to(dtype))

        return build

    def lowp(backend: Backend) -> Callable[[], Solve]:
        def build() -> Solve:
            layer = LowpLinear(weight, format="int8", backend=backend)
            return lambda x: layer(x)

        return _here(build)

    def truth(x: Tensor) -> Tensor:
        product: Tensor = x.float() @ weight.T
        return product

    largest = 5.0  # of a Gaussian sum of unit variance over this many outputs
    return Problem(
        "linear",
        {"rows": rows, "inputs": inputs_, "outputs": outputs},
        "bfloat16", inputs, truth, largest * (error or tolerance(torch.bfloat16, inputs_, 1, units=1.5)),
        [
            Variant("plain_bf16", plain),
            Variant("packed_bf16", packed(torch.bfloat16)),
            Variant("packed_fp32", packed(torch.float32), precision="fp32"),
            Variant("int8_torch", lowp("torch"), precision="int8"),
            Variant("int8_native", lowp("native"), precision="int8"),
        ],
        counts.linear(rows, outputs, inputs_),
    )  # fmt: skip


def _here(build: Callable[[], Solve]) -> Callable[[], Solve]:
    """Turn "this backend cannot run here" into "there is no such variant here"; it may show at the first call only."""

    def built() -> Solve:
        try:
            return build()
        except BackendUnavailableError as error:
            raise UnavailableVariantError(str(error)) from error

    return built


def _random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _precision(dtype: torch.dtype) -> Precision:
    return "fp32" if dtype == torch.float32 else "bf16"


def standard_problems(dtype: torch.dtype = torch.bfloat16) -> list[Problem]:
    """Return one problem of each operator at the shapes of ``configs/model/large.yaml`` and of published benchmarks."""
    return [
        broadcast_gemm_problem(1_000, 1_024, 256, 1_024, dtype),
        broadcast_attention_problem(500, 1, 2_048, 2, 64, dtype),
        fm_block_problem(1_000, 33, 64, 16, dtype),
        grouped_gemm_problem(100, 16, 64, dtype),
        linear_problem(1_000, 1_024, 1_024, INT8_ERROR),
        linear_problem(1_000, 1_024, 1_024),
    ]
