"""Checks of low-precision layers, grouped and batched ones, and top-k; the others are in ``cases``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu_check.check import Check, Prepared
from kernels.grouped_gemm import grouped_gemm
from kernels.horizontal_linear import LinearBatch, MergedLinear
from kernels.lowp_linear import LowpLinear, quantize, rms_norm_quantize
from kernels.roofline import counts
from kernels.tolerance import tolerance

BF16 = torch.bfloat16


def lowp_checks() -> list[Check]:
    """Return the FP8 product with its quantize step, and the norm fused with the quantize step."""
    small, large = [(1, 16, 16), (33, 130, 272)], [(1000, 1024, 1024), (4000, 4096, 4096), (1000, 512, 2048)]
    checks = []
    for sizes in small + large:
        shape = "M{} N{} K{}".format(*sizes)
        timed = sizes in large
        checks.append(Check("lowp_linear", f"fp8 {shape}", partial(_fp8, sizes), timed, counts.linear(*sizes, "fp8")))
        norm = counts.norm_quantize(sizes[0], sizes[2])
        checks.append(Check("lowp_linear", f"norm fp8 {shape}", partial(_norm, sizes), timed, norm))
    return checks


def _fp8(sizes: tuple[int, int, int], device: torch.device) -> Prepared:
    num_rows, num_outputs, num_inputs = sizes
    x = torch.randn(num_rows, num_inputs, device=device, dtype=BF16)
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=BF16)
    layer = LowpLinear(weight, format="fp8_rowwise", backend="triton")

    def expected() -> tuple[Tensor, Tensor]:
        rows, columns = (
            quantize(value, format="fp8_rowwise", backend="reference").dequantize().double() for value in (x, weight)
        )
        return rows @ columns.T, rows.abs() @ columns.abs().T

    # Between two additions to the float32 accumulator the tensor core keeps 14 bits.
    partial_sums = 128 * 2.0**-13
    return Prepared(
        fused=lambda: layer(x),
        unfused=lambda: functional.linear(x, weight),
        expected=expected,
        tolerance=tolerance(BF16, num_inputs) + partial_sums,
    )


def _norm(sizes: tuple[int, int, int], device: torch.device) -> Prepared:
    num_rows, _, num_inputs = sizes
    x = torch.randn(num_rows, num_inputs, device=device, dtype=BF16)
    gain = torch.randn(num_inputs, device=device, dtype=BF16)

    def unfused() -> Tensor:
        return quantize(
            functional.rms_norm(x, gain.shape, gain, 1e-6), format="fp8_rowwise", backend="reference"
        ).values

    def expected() -> tuple[Tensor, Tensor]:
        wide = x.double()
        truth = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * gain.double()
        # Half a step of e4m3: 1/16 of the value, at least half of the subnormal step of the row's scale.
        least = truth.abs().amax(1, keepdim=True) / 448 * 2.0**-10
        return truth, (truth.abs() / 16).maximum(least)

    return Prepared(
        fused=lambda: rms_norm_quantize(x, gain, format="fp8_rowwise", backend="triton").dequantize(),
        unfused=unfused,
        expected=expected,
        tolerance=1.0 + 16 * tolerance(torch.float32, num_inputs),
    )


def grouped_checks() -> list[Check]:
    """Return grouped products: empty groups, odd sizes, 100 features, eight experts."""
    small = [((10, 0, 65, 25), 48, 64), ((0, 0, 3), 33, 17)]
    large = [((500,) * 100, 64, 64), (tuple(range(100, 900, 100)), 1024, 1024)]
    return [
        Check("grouped_gemm", f"G{len(rows)} T{sum(rows)} N{n} K{k}", partial(_grouped, rows, n, k),
              is_timed=(rows, n, k) in large, work=counts.grouped_gemm(rows, n, k))
        for rows, n, k in small + large
    ]  # fmt: skip


def _grouped(sizes: tuple[int, ...], num_outputs: int, num_inputs: int, device: torch.device) -> Prepared:
    x = torch.randn(sum(sizes), num_inputs, device=device, dtype=BF16)
    weight = torch.randn(len(sizes), num_outputs, num_inputs, device=device, dtype=BF16)
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([functional.linear(a, w) for a, w in zip(torch.split(x, list(sizes)), weight, strict=True)])

    return Prepared(
        fused=lambda: grouped_gemm(x, weight, offsets, backend="triton"),
        unfused=lambda: loop(x, weight),
        expected=lambda: (loop(x.double(), weight.double()), loop(x.double().abs(), weight.double().abs())),
        tolerance=tolerance(BF16, num_inputs),
    )


def horizontal_checks() -> list[Check]:
    """Return merged layers of one input, and batches of layers of unlike shapes."""
    merged = [
        ("merged 3 M33 K70", 33, 70, (5, 64, 1), False),
        ("merged 12x64 M1000 K256", 1000, 256, (64,) * 12, True),
    ]
    batches = [
        ("batch of 3, odd", ((16, 24, 32), (0, 7, 9), (70, 65, 33)), False),
        ("batch of 64, M500 N64 K16-128", tuple((500, 64, 16 * (1 + i % 8)) for i in range(64)), True),
    ]
    return [
        *(
            Check("horizontal_linear", shape, partial(_merged, m, k, sizes), timed, counts.linear(m, sum(sizes), k))
            for shape, m, k, sizes, timed in merged
        ),
        *(
            Check("horizontal_linear", shape, partial(_batch, sizes), timed, counts.linear_batch(sizes))
            for shape, sizes, timed in batches
        ),
    ]


def _merged(num_rows: int, num_inputs: int, sizes: tuple[int, ...], device: torch.device) -> Prepared:
    x = torch.randn(num_rows, num_inputs, device=device, dtype=BF16)
    weights = [torch.randn(size, num_inputs, device=device, dtype=BF16) for size in sizes]
    merged = MergedLinear(weights, backend="triton")
    whole = torch.cat(weights).double()
    return Prepared(
        fused=lambda: _joined(merged(x)),
        unfused=lambda: _joined(tuple(functional.linear(x, weight) for weight in weights)),
        expected=lambda: (x.double() @ whole.T, x.double().abs() @ whole.abs().T),
        tolerance=tolerance(BF16, num_inputs),
    )


def _batch(shapes: tuple[tuple[int, int, int], ...], device: torch.device) -> Prepared:
    inputs = [torch.randn(m, k, device=device, dtype=BF16) for m, _, k in shapes]
    weights = [torch.randn(n, k, device=device, dtype=BF16) for _, n, k in shapes]
    batch = LinearBatch(weights, backend="triton")

    def flat(outputs: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([output.reshape(-1) for output in outputs])

    def product(x: Tensor, weight: Tensor, *, is_size: bool) -> Tensor:
        wide, truth = x.double(), weight.double()
        return wide.abs() @ truth.abs().T if is_size else wide @ truth.T

    def expected() -> tuple[Tensor, Tensor]:
        pairs = list(zip(inputs, weights, strict=True))
        truth, size = (flat(tuple(product(x, w, is_size=is_size) for x, w in pairs)) for is_size in (False, True))
        return truth, size

    return Prepared(
        fused=lambda: flat(batch(inputs)),
        unfused=lambda: flat(tuple(functional.linear(x, w) for x, w in zip(inputs, weights, strict=True))),
        expected=expected,
        tolerance=tolerance(BF16, max(k for _, _, k in shapes)),
    )


def topk_checks() -> list[Check]:
    """Return top-k over one long segment and over many, ties and NaN among them."""
    small = [((0, 7, 3, 0), 2), ((5000, 1, 4097), 4100)]
    large = [((1_000_000,), 1000), ((4000,) * 64, 100)]
    return [
        Check("segmented_topk", f"S{len(lengths)} N{sum(lengths)} k{k}", partial(_topk, lengths, k),
              is_timed=(lengths, k) in large,
              work=counts.segmented_topk(lengths, k, with_tie_keys=True))
        for lengths, k in small + large
    ]  # fmt: skip


def _topk(lengths: tuple[int, ...], k: int, device: torch.device) -> Prepared:
    from kernels.segmented_topk.triton_kernel import segmented_topk_on_device

    # Rounded: ties are the rule, also at the threshold.
    values = (torch.randn(sum(lengths), device=device) * 100).round()
    values[::97] = float("nan")
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    ties = torch.randint(-3, 3, values.shape, device=device)

    def expected() -> tuple[Tensor, Tensor]:
        best = []
        for begin, length in zip(offsets.tolist(), lengths, strict=False):
            part = slice(begin, begin + length)
            order = torch.argsort(ties[part], stable=True)
            order = order[torch.argsort(-values[part][order], stable=True)]
            best.append(order[:k] + begin)
        truth = torch.cat(best).double()
        # Any other index is wrong by at least 1.
        return truth, torch.ones_like(truth)

    return Prepared(
        fused=lambda: segmented_topk_on_device(values, offsets, k, ties, max(lengths))[0],
        unfused=lambda: torch.cat(
            [torch.topk(part, min(k, len(part))).indices for part in torch.split(values, list(lengths))]
        ),
        expected=expected,
        tolerance=0.0,
    )


def _joined(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(outputs, 1)
