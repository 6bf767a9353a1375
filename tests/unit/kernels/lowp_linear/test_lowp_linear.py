"""Low-precision products of every backend against the reference, and the fused norm and quantize step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backends import BackendUnavailableError
from kernels.lowp_linear import FORMATS, LowpLinear, quantize, rms_norm_quantize
from kernels.lowp_linear.formats import Quantized
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(1, 1, 32), (33, 130, 96), (0, 5, 64), (70, 16, 288)]
PAIRS = [
    pytest.param(name, backend, marks=[pytest.mark.interpret] if backend == "triton" else [])
    for name, backends in FORMATS.items()
    for backend in backends
    if backend != "native"
]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _dequantized(x: Tensor, name: Any) -> Tensor:
    return x.bfloat16().float() if name == "bf16" else quantize(x, format=name, backend="reference").dequantize()


@pytest.mark.parametrize(("name", "backend"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_that_of_the_values_taken_back(name: Any, backend: Any, dtype: torch.dtype, shape: Any) -> None:
    num_rows, num_outputs, num_inputs = shape
    x, weight = _random(num_rows, num_inputs, dtype=dtype), _random(num_outputs, num_inputs, dtype=dtype, seed=1)
    found = LowpLinear(weight, format=name, backend=backend)(x)
    rows, columns = _dequantized(x, name).double(), _dequantized(weight, name).double()
    error = largest_error(found, rows @ columns.T, rows.abs() @ columns.abs().T)
    # Stock bf16 and FP8 products leave in bf16 even if x is float32.
    stored = torch.bfloat16 if backend == "torch" and name in ("bf16", "fp8_rowwise") else dtype
    assert error <= tolerance(stored, num_inputs, roundings=2)
    assert found.dtype == dtype


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_a_norm_before_the_product_is_part_of_it(name: Any, backend: Any) -> None:
    x, gain, weight = _random(9, 96), _random(96, seed=3), _random(20, 96, seed=1)
    layer = LowpLinear(weight, format=name, backend=backend)
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * gain
    found, expected = layer(x, gain, 1e-5), layer(normed)
    # The norm's own rounding may move a value of the narrow format by one step.
    assert float((found - expected).norm() / expected.norm()) < 0.01
    with pytest.raises(ValueError, match=r"gain_K must be float32 \[96\]"):
        layer(x, gain[:-1])


@pytest.mark.parametrize(("name", "limit"), [("bf16", 0.004), ("int8", 0.02), ("fp8_rowwise", 0.045), ("mxfp8", 0.045)])
def test_error_against_float32_is_that_of_the_format(name: Any, limit: float) -> None:
    x, weight = _random(64, 256), _random(48, 256, seed=1)
    found, expected = LowpLinear(weight, format=name, backend="reference")(x), x @ weight.T
    assert limit / 4 < float((found - expected).norm() / expected.norm()) < limit


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [(1, 16), (33, 272), (0, 32), (5, 4112)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_quantizes_to_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (_random(*shape) * 2.0 ** _random(shape[0], 1, seed=1).mul(8)).to(dtype)
    if len(x) > 3:
        x[3] = 0
    found, expected = (quantize(x, format="fp8_rowwise", backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0)
    torch.testing.assert_close(found.values.float(), expected.values.float(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (33, 272), (0, 32)])
def test_norm_and_quantize_round_once(backend: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, gain = _random(*shape, dtype=dtype), _random(shape[1], dtype=dtype, seed=1)
    found = rms_norm_quantize(x, gain, format="fp8_rowwise", backend=backend)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * gain.double()
    step = (expected.abs() / 16).maximum(found.scales.double()[:, None] * 2.0**-10)
    margin = 1 + tolerance(torch.float32, shape[1]) * 16
    assert bool(((found.dequantize().double() - expected).abs() <= step * margin).all())


@pytest.mark.parametrize("name", ["int8", "fp8_rowwise", "mxfp8"])
def test_rows_may_be_quantized_once_for_several_layers(name: Any) -> None:
    x, gain = _random(9, 64), _random(64, seed=3)
    rows = rms_norm_quantize(x, gain, format=name, backend="reference")
    for seed in (1, 2):
        layer = LowpLinear(_random(7, 64, seed=seed), format=name, backend="reference")
        expected = rows.dequantize() @ layer.weight.dequantize().T
        torch.testing.assert_close(layer.multiply(rows, torch.float32), expected, rtol=0, atol=0)


def test_int8_rows_do_not_depend_on_their_batch() -> None:
    layer = LowpLinear(_random(40, 64), format="int8", backend="torch")
    x = _random(20, 64, seed=4)
    torch.testing.assert_close(torch.cat([layer(row[None]) for row in x]), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "name", "backend", "message"),
    [
        ((4,), "int8", "torch", "weight_NK must be"),
        ((4, 33), "mxfp8", "reference", "K of format 'mxfp8' must be a multiple of 32, is 33"),
        ((4, 17), "fp8_rowwise", "triton", "K of format 'fp8_rowwise' must be a multiple of 16, is 17"),
        ((4, 32), "mxfp8", "torch", "backend of format 'mxfp8' must be one of reference, is 'torch'"),
        ((4, 32), "int4", "torch", "format must be one of bf16, int8, fp8_rowwise, mxfp8, is 'int4'"),
    ],
)
def test_a_wrong_layer_is_refused(shape: tuple[int, ...], name: Any, backend: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowpLinear(torch.zeros(shape), format=name, backend=backend)


def test_a_wrong_call_is_refused() -> None:
    layer = LowpLinear(torch.zeros(4, 32), format="int8", backend="reference")
    with pytest.raises(ValueError, match=r"x_MK must be .* \[any, 32\]"):
        layer(torch.zeros(2, 31))
    other = quantize(torch.zeros(2, 32), format="mxfp8", backend="reference")
    with pytest.raises(ValueError, match="format of rows must be one of int8, is 'mxfp8'"):
        layer.multiply(other, torch.float32)
    with pytest.raises(ValueError, match=r"rows must be int8 \[any, 32\]"):
        layer.multiply(Quantized(torch.zeros(2, 31).char(), torch.ones(2), "int8"), torch.float32)
    with pytest.raises(ValueError, match="multiply needs a quantized weight"):
        LowpLinear(torch.zeros(4, 32), format="bf16", backend="torch").multiply(other, torch.float32)
    with pytest.raises(ValueError, match="gain_K must be float32"):
        rms_norm_quantize(torch.zeros(2, 32), torch.zeros(31), format="int8", backend="reference")
    with pytest.raises(ValueError, match="format must be one of int8, fp8_rowwise, mxfp8, is 'bf16'"):
        quantize(torch.zeros(2, 32), format="bf16", backend="reference")
    with pytest.raises(ValueError, match=r"x_MK must be float32 or bfloat16 \[any, any\], is float16"):
        quantize(torch.zeros(2, 32).half(), format="int8", backend="native")


def test_triton_is_not_replaced_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailableError, match="needs tensors on a GPU"):
        quantize(torch.zeros(2, 32), format="fp8_rowwise", backend="triton")


@pytest.mark.interpret
def test_triton_refuses_rows_longer_than_a_program_takes() -> None:
    with pytest.raises(ValueError, match="must be at most 32768, is 32784"):
        quantize(torch.zeros(0, 32_784), format="fp8_rowwise", backend="triton")
