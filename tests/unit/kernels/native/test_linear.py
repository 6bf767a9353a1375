"""Native linears: bf16 with a request's part, int8, and the quantization of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native import BroadcastLinear, Int8Linear, quantize_rows
from kernels.tolerance import largest_error, tolerance
from tests.unit.kernels.native.support import assert_close, require_native

# rows, inputs, outputs
SHAPES = [(0, 4, 4), (1, 1, 1), (5, 7, 9), (1, 64, 64), (33, 257, 129), (100, 130, 70), (7, 64, 1000), (203, 32, 80)]


@pytest.fixture(autouse=True)
def _native() -> None:
    require_native()


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _on_threads(run: Callable[[], Tensor]) -> list[Tensor]:
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(run())
        return answers
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("poisoned_memory")
def test_broadcast_linear_equals_two_linears(shape: Any, relu: bool, out_dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    weight, x = _normal(outputs, inputs).bfloat16(), _normal(rows, inputs, seed=1).bfloat16()
    part = _normal(3, outputs, seed=2)
    request = torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    expected = x.double() @ weight.double().T + part.double()[request.long()]
    size = x.double().abs() @ weight.double().abs().T + part.double().abs()[request.long()]
    expected = expected.relu() if relu else expected
    linear = BroadcastLinear(weight)
    found = linear(x, part, request, relu, out_dtype)
    assert found.dtype == out_dtype
    # The request's part enters in fp32: with an fp32 answer nothing is rounded to bf16.
    assert largest_error(found, expected, size) <= tolerance(out_dtype, inputs)
    alone = linear(x, part[1:2].contiguous(), None, relu, out_dtype)
    assert torch.equal(alone[request == 1], found[request == 1])


def test_broadcast_linear_does_not_depend_on_batch_or_threads() -> None:
    linear, x, part = BroadcastLinear(_normal(200, 65)), _normal(203, 65, seed=1).bfloat16(), _normal(1, 200)
    answers = _on_threads(lambda: linear(x, part))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    for cut in (1, 5, 97):
        assert torch.equal(linear(x[:cut], part), answers[0][:cut])


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (5, 7, 9, 3), (203, 32, 200, 130), (0, 4, 70, 6), (53, 384, 777, 130), (1201, 16, 1040, 34)]
)
@pytest.mark.parametrize("num_requests", [1, 3, 70])
@pytest.mark.usefixtures("poisoned_memory")
def test_both_halves_in_one_call_are_the_two_calls(shape: Any, num_requests: int) -> None:
    rows, inputs, outputs, request_inputs = shape
    linear = BroadcastLinear(_normal(outputs, inputs), _normal(outputs, request_inputs, seed=1))
    x = _normal(rows, inputs, seed=2).bfloat16()
    request_x = _normal(num_requests, request_inputs, seed=3).bfloat16()
    request = torch.randint(0, num_requests, (rows,), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    expected = linear(x, linear.request_part(request_x), request, True)
    for found in _on_threads(lambda: linear.both(x, request_x, request, True)):
        assert torch.equal(found, expected)


def test_without_a_part_sums_start_at_zero() -> None:
    linear, x = BroadcastLinear(_normal(70, 33)), _normal(11, 33, seed=1).bfloat16()
    assert torch.equal(linear(x), linear(x, torch.zeros(1, 70)))


def test_a_row_of_odd_width_does_not_see_its_neighbour() -> None:
    linear, x, part = BroadcastLinear(_normal(5, 3)), _normal(4, 3).bfloat16(), torch.zeros(1, 5)
    clean = linear(x, part)
    x[2] = torch.nan
    found = linear(x, part)
    others = torch.arange(4) != 2
    assert torch.isnan(found[2]).all()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (5, 33), (70, 128)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_rows_are_quantized_to_half_a_step(dtype: torch.dtype, shape: Any, with_norm: bool) -> None:
    x = _normal(*shape).to(dtype)
    gain = 1 + 0.1 * _normal(shape[1], seed=1) if with_norm else None
    q, scale = quantize_rows(x, gain)
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * gain.double()
    assert q.dtype == torch.int8
    assert (q.abs() <= 127).all()
    if wide.numel() == 0:
        return
    largest = wide.abs().amax(1)
    assert largest_error(scale * 127, largest) <= tolerance(torch.float32, shape[1])
    # Half a step, and the rounding of the quotient just before.
    step = scale.double()[:, None] * (0.5 + 127 * tolerance(torch.float32, shape[1]))
    assert ((q * scale.double()[:, None] - wide).abs() <= step).all()
    assert (q.abs().amax(1) == 127).all()


def test_rows_of_zeros_nan_and_infinity() -> None:
    x = torch.ones(4, 20)
    x[0] = 0.0
    x[1, 3] = torch.nan
    x[2, 19] = torch.inf
    q, scale = quantize_rows(x)
    assert scale[0] == 0.0
    assert (q[0] == 0).all()
    assert torch.isnan(scale[1])
    assert torch.isinf(scale[2])
    found = Int8Linear(torch.ones(3, 20))(x)
    assert (found[0] == 0.0).all()
    assert not torch.isfinite(found[1:3]).any()
    assert torch.isfinite(found[3]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", ["none", "row", "matrix"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_int8_linear_is_the_product_of_what_it_quantized(
    shape: Any, dtype: torch.dtype, bias: str, with_norm: bool
) -> None:
    rows, inputs, outputs = shape
    weight, x = _normal(outputs, inputs), _normal(rows, inputs, seed=1).to(dtype)
    gain = 1 + 0.1 * _normal(inputs, seed=4) if with_norm else None
    added = {"none": None, "row": _normal(outputs, seed=2), "matrix": _normal(rows, outputs, seed=3)}[bias]
    found = Int8Linear(weight)(x, added, gain=gain)
    q, scale = quantize_rows(x, gain)
    w, w_scale = quantize_rows(weight)
    exact = (q.double() @ w.double().T) * scale.double()[:, None] * w_scale.double()
    expected = exact if added is None else exact + added.double()
    # Sums of integers are exact: only the two scales, their product and the sum with the bias are rounded.
    size = exact.abs() + (0.0 if added is None else added.double().abs())
    assert largest_error(found, expected, size) <= tolerance(torch.float32, 4)


def test_int8_linear_is_near_the_linear_it_stands_for() -> None:
    weight, x = _normal(96, 512), _normal(50, 512, seed=1)
    found, expected = Int8Linear(weight)(x), x @ weight.T
    # Independent errors of half a step in both factors: 1.3 % for normal data.
    assert (found - expected).norm() <= 0.02 * expected.norm()
    rounded = Int8Linear(weight)(x, relu=True, out_dtype=torch.bfloat16)
    assert_close(rounded, found.relu(), dtype=torch.bfloat16, reduction=1)


def test_int8_linear_does_not_depend_on_batch_or_threads() -> None:
    linear, x = Int8Linear(_normal(200, 70)), _normal(203, 70, seed=1)
    answers = _on_threads(lambda: linear(x))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    for cut in (1, 5, 97):
        assert torch.equal(linear(x[:cut]), answers[0][:cut])


def test_the_largest_sums_fit() -> None:
    inputs = 65536
    found = Int8Linear(torch.ones(1, inputs))(torch.ones(2, inputs))
    assert largest_error(found, torch.full((2, 1), float(inputs))) <= tolerance(torch.float32, 4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: BroadcastLinear(torch.zeros(3)), r"weight must be \[N, K\]"),
        (lambda: BroadcastLinear(torch.zeros(3, 4))(torch.zeros(2, 4), torch.zeros(1, 3)), "x must be torch.bfloat16"),
        (
            lambda: BroadcastLinear(torch.zeros(3, 4))(torch.zeros(2, 4).bfloat16(), torch.zeros(1, 4)),
            r"request_part must be torch.float32 \[\?, 3\]",
        ),
        (
            lambda: BroadcastLinear(torch.zeros(3, 4))(torch.zeros(2, 4).bfloat16(), torch.zeros(2, 3)),
            "candidate_to_request must be given for 2 requests",
        ),
        (lambda: BroadcastLinear(torch.zeros(3, 4), torch.zeros(2, 4)), "request_weight must have 3 rows, has 2"),
        (lambda: BroadcastLinear(torch.zeros(3, 4)).request_part(torch.zeros(1, 4)), "request_weight must be given"),
        (
            lambda: BroadcastLinear(torch.zeros(3, 4), torch.zeros(3, 5)).both(
                torch.zeros(2, 4).bfloat16(), torch.zeros(1, 4).bfloat16()
            ),
            r"request_x must be torch.bfloat16 \[\?, 5\]",
        ),
        (lambda: Int8Linear(torch.zeros(1, 65537)), r"K in \[1, 65536\], is \[1, 65537\]"),
        (
            lambda: Int8Linear(torch.zeros(3, 4))(torch.zeros(2, 5)),
            r"x must be .* \[\?, 4\], is torch.float32 \[2, 5\]",
        ),
        (lambda: Int8Linear(torch.zeros(3, 4))(torch.zeros(2, 4), torch.zeros(2)), r"bias must be torch.float32 \[3\]"),
        (
            lambda: Int8Linear(torch.zeros(3, 4))(torch.zeros(2, 4), torch.zeros(1, 3)),
            r"bias must be torch.float32 \[2, 3\]",
        ),
        (lambda: Int8Linear(torch.zeros(3, 4))(torch.zeros(2, 4), out_dtype=torch.half), "out_dtype must be"),
        (lambda: quantize_rows(torch.zeros(2, 4).half()), "x must be torch.bfloat16 or torch.float32"),
        (lambda: quantize_rows(torch.zeros(2, 4), torch.ones(3)), r"gain must be torch.float32 \[4\]"),
        (lambda: quantize_rows(torch.zeros(2, 4), epsilon=0.0), "epsilon must be in"),
    ],
)
def test_bad_input_is_refused(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run()
