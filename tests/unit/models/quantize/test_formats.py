"""Every format computes the product to its precision, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.quantize.formats import FORMATS, Format, formats_of_device, linear_in
from shared.clock import SystemClock

_EPSILON: dict[Format, float] = {
    "fp32": torch.finfo(torch.float32).eps,
    "fp32_packed": torch.finfo(torch.float32).eps,
    "bf16_packed": torch.finfo(torch.bfloat16).eps,
    # Half a step of 127 on either side of the product.
    "int8": 1 / 127,
    "int8_native": 1 / 127,
}


def _skip_unless_fast(number_format: Format) -> None:
    if why := formats_of_device(SystemClock())[number_format]:
        pytest.skip(why)


def _product(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(num_rows + num_inputs)
    rows = torch.randn(num_rows, num_inputs, generator=random)
    return rows, torch.randn(num_outputs, num_inputs, generator=random)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 34, 43), (33, 70, 17), (100, 544, 96)])
def test_a_format_is_right_to_its_precision(number_format: Format, shape: tuple[int, int, int]) -> None:
    _skip_unless_fast(number_format)
    rows, weight = _product(*shape)
    found = linear_in(weight, number_format)(rows)
    assert found.dtype == torch.float32
    expected = rows.double() @ weight.double().t()
    # Each rounding is of one factor: 4 * eps * sqrt(K) times the largest factors.
    limit = 4 * _EPSILON[number_format] * shape[1] ** 0.5 * float(rows.abs().max() * weight.abs().max())
    assert float((found.double() - expected).abs().max()) <= limit


@pytest.mark.parametrize("number_format", ["fp32_packed", "bf16_packed", "int8", "int8_native"])
def test_the_bits_of_a_row_do_not_depend_on_the_others(number_format: Format) -> None:
    _skip_unless_fast(number_format)
    rows, weight = _product(200, 96, 64)
    linear = linear_in(weight, number_format)
    whole = linear(rows)
    for count in (8, 16, 64, 104):
        assert torch.equal(linear(rows[:count]), whole[:count])


@pytest.mark.parametrize("number_format", FORMATS)
def test_leading_axes_stay(number_format: Format) -> None:
    _skip_unless_fast(number_format)
    rows, weight = _product(24, 16, 5)
    linear = linear_in(weight, number_format)
    assert torch.equal(linear(rows.view(3, 8, 16)), linear(rows).view(3, 8, 5))


def test_int8_of_zero_rows_is_zero() -> None:
    assert not linear_in(torch.randn(4, 8), "int8")(torch.zeros(8, 8)).any()


class _SlowClock:
    """A clock on which every second measurement of a probe takes a hundred times longer, from the second format on."""

    def __init__(self) -> None:
        self._reads = 0
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def monotonic_s(self) -> float:
        self._reads += 1
        self._now_s += 1.0 if self._reads <= 10 else 100.0
        return self._now_s

    async def sleep_s(self, duration_s: float) -> None:
        self._now_s += duration_s


def test_a_format_without_its_instructions_is_left_out_with_the_reason() -> None:
    found = formats_of_device(_SlowClock())
    assert found["fp32"] == ""
    assert found["bf16_packed"] == "a 256^3 product took 100 times fp32"
