"""Formats: exact encodings, ties, saturation, zeros, the smallest values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.lowp_linear.formats import (
    E4M3_MAX,
    decode_e8m0,
    encode_e8m0,
    quantize_fp8_rows,
    quantize_int8_rows,
    quantize_mxfp8,
    to_e4m3,
)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _e4m3_values() -> list[float]:
    """Every finite non-negative e4m3 number, from its definition: 4 exponent bits, bias 7, 3 mantissa bits."""
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return (subnormal + normal)[:-1]


def test_e4m3_keeps_its_own_numbers_and_rounds_others_to_the_nearest_even() -> None:
    numbers = torch.tensor(_e4m3_values())
    assert numbers[-1] == E4M3_MAX
    assert to_e4m3(numbers).float().tolist() == numbers.tolist()
    between = (numbers[1:] + numbers[:-1]) / 2
    rounded = to_e4m3(between).float()
    even = torch.where(torch.arange(len(between)) % 2 == 0, numbers[:-1], numbers[1:])
    assert rounded.tolist() == even.tolist()
    assert to_e4m3(torch.tensor([464.0, 1e9, float("inf"), -500.0])).float().tolist() == [448.0, 448.0, 448.0, -448.0]


def test_mx_scale_is_the_least_power_of_two_under_which_the_largest_value_fits() -> None:
    most = torch.cat([_random(2000).abs() * 2.0 ** _random(2000, seed=1).mul(20).round(), torch.tensor([448.0, 449.0])])
    scales = decode_e8m0(encode_e8m0(most)).double()
    assert bool((most.double() <= E4M3_MAX * scales).all())
    assert bool((most.double() > E4M3_MAX * scales / 2).all())


def test_mx_scale_of_an_exact_multiple_is_not_rounded_up() -> None:
    powers = 2.0 ** torch.arange(-60, 60).float()
    assert decode_e8m0(encode_e8m0(E4M3_MAX * powers)).tolist() == powers.tolist()
    above = torch.nextafter(E4M3_MAX * powers, torch.tensor(float("inf")))
    assert decode_e8m0(encode_e8m0(above)).tolist() == (2 * powers).tolist()


def test_mx_scales_decode_as_torch_does_over_every_exponent() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    expected = [2.0 ** (byte - 127) for byte in range(255)]
    assert decode_e8m0(scales).double().tolist() == expected
    assert encode_e8m0(torch.zeros(3)).tolist() == [0, 0, 0]
    assert encode_e8m0(torch.tensor([1e-44, 3.0e38])).tolist() == [0, 127 + 120]


def test_mxfp8_keeps_what_its_blocks_can_hold() -> None:
    numbers = torch.tensor([*_e4m3_values(), 0.0]).view(4, 32)
    # Each block holds e4m3 numbers times its own power of two, with its largest one present.
    numbers[:, 0] = E4M3_MAX
    x = (numbers * torch.tensor([1.0, 2.0**-20, 2.0**30, 2.0**100])[:, None]).view(1, 128)
    back = quantize_mxfp8(x)
    assert back.scales.tolist() == [[127, 107, 157, 227]]
    assert torch.equal(back.dequantize(), x)


@pytest.mark.parametrize("quantizer", [quantize_fp8_rows, quantize_int8_rows, quantize_mxfp8])
def test_error_stays_within_half_a_step(quantizer: object) -> None:
    assert callable(quantizer)
    x = _random(33, 96) * 2.0 ** _random(33, 1, seed=2).mul(10)
    found = quantizer(x)
    step = x.abs().amax(1, keepdim=True) / 254 if found.format == "int8" else x.abs() / 16
    # e4m3: half a unit of a three-bit mantissa, or of the subnormal step 2^-9 of the scale.
    if found.format == "fp8_rowwise":
        step = step.maximum(found.scales[:, None] * 2.0**-10)
    elif found.format == "mxfp8":
        step = step.maximum(decode_e8m0(found.scales).repeat_interleave(32, 1) * 2.0**-10)
    assert bool(((found.dequantize() - x).abs() <= step * (1 + 1e-5)).all())


@pytest.mark.parametrize("quantizer", [quantize_fp8_rows, quantize_int8_rows, quantize_mxfp8])
def test_rows_of_zeros_and_of_the_smallest_numbers(quantizer: object) -> None:
    assert callable(quantizer)
    found = quantizer(torch.zeros(2, 32)).dequantize()
    assert torch.equal(found, torch.zeros(2, 32))
    tiny = quantizer(torch.full((1, 32), 1e-44)).dequantize()
    assert bool(tiny.isfinite().all())
    assert float(tiny.abs().max()) <= 1e-37
    assert quantizer(torch.zeros(0, 32)).dequantize().shape == (0, 32)


def test_one_outlier_costs_the_rest_of_an_int8_row_more_than_of_an_fp8_row() -> None:
    x = _random(64, 256)
    x[:, 3] = 80.0
    rest = torch.arange(256) != 3
    error = {q.format: float((q.dequantize() - x)[:, rest].norm() / x[:, rest].norm()) for q in
             (quantize_int8_rows(x), quantize_fp8_rows(x), quantize_mxfp8(x))}  # fmt: skip
    assert error["int8"] > 4 * error["fp8_rowwise"]
    assert error["mxfp8"] < 0.04
