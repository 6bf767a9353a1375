"""The facades' ``native`` backend: same answers as the reference, and a clear refusal where it cannot run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backends import BackendUnavailableError
from kernels.broadcast_attention import broadcast_attention
from kernels.broadcast_gemm import BroadcastGemm
from kernels.lowp_linear import LowpLinear, quantize, rms_norm_quantize
from kernels.native import NativeStatus
from kernels.segmented_topk import segmented_topk
from kernels.tolerance import largest_error, tolerance
from tests.unit.kernels.native.support import require_native

BF16 = torch.bfloat16


@pytest.fixture
def native() -> None:
    require_native()


def _random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (33, 65, 71, 19, 3), (0, 17, 8, 8, 2)])
def test_broadcast_gemm(activation: Any, sizes: tuple[int, int, int, int, int]) -> None:
    num_candidates, num_outputs, num_inputs, num_request_inputs, num_requests = sizes
    weights = _random(num_outputs, num_inputs), _random(num_outputs, num_request_inputs, seed=1)
    x, request = _random(num_candidates, num_inputs, seed=2), _random(num_requests, num_request_inputs, seed=3)
    index = None if num_requests == 1 else torch.arange(num_candidates) * 7 % num_requests
    ops = [BroadcastGemm(*weights, activation=activation, backend=backend) for backend in ("native", "reference")]
    found, expected = (op(x, op.request_part(request), index) for op in ops)
    assert largest_error(found, expected) <= tolerance(BF16, num_inputs + num_request_inputs, roundings=2)
    assert torch.equal(ops[0].both(x, request, index), found)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("scale", [0.1, 0.3])
@pytest.mark.parametrize("lengths", [[33], [65, 0, 1, 130]])
def test_broadcast_attention_has_one_meaning_of_scale(activation: Any, scale: float, lengths: list[int]) -> None:
    q = _random(9, 3, 2, 24)
    k, v = _random(sum(lengths), 2, 24, seed=1), _random(sum(lengths), 2, 24, seed=2)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    index = None if len(lengths) == 1 else torch.arange(9) % len(lengths)
    found, expected = (
        broadcast_attention(q, k, v, ends, index, activation=activation, scale=scale, backend=backend)
        for backend in ("native", "reference")
    )
    assert largest_error(found, expected) <= tolerance(BF16, 36 * (24 + max(lengths)), roundings=4)


@pytest.mark.usefixtures("native")
def test_broadcast_attention_on_dense_keys() -> None:
    q, k, v = _random(6, 2, 2, 16), _random(3, 5, 2, 16, seed=1), _random(3, 5, 2, 16, seed=2)
    index = torch.tensor([2, 0, 0, 1, 2, 0], dtype=torch.int32)
    found, expected = (broadcast_attention(q, k, v, None, index, backend=name) for name in ("native", "reference"))
    assert largest_error(found, expected) <= tolerance(BF16, 36 * 21, roundings=4)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_int8_linear_and_its_quantizer(dtype: torch.dtype, with_norm: bool) -> None:
    x, weight, gain = _random(33, 70, dtype=dtype), _random(20, 70, dtype=dtype, seed=1), _random(70, dtype=dtype)
    given = gain if with_norm else None
    found, expected = (
        LowpLinear(weight, format="int8", backend=backend)(x, given) for backend in ("native", "reference")
    )
    assert found.dtype == dtype
    # Half a step of int8 where a value lies between two of them.
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.01
    if with_norm:
        rows = [rms_norm_quantize(x, gain, format="int8", backend=backend) for backend in ("native", "reference")]
    else:
        rows = [quantize(x, format="int8", backend=backend) for backend in ("native", "reference")]
    assert int((rows[0].values.int() - rows[1].values.int()).abs().max()) <= 1
    assert largest_error(rows[0].scales, rows[1].scales) <= tolerance(torch.float32, 70)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("with_keys", [False, True])
def test_segmented_topk(with_keys: bool) -> None:
    random = np.random.default_rng(1)
    values = random.choice(np.array([0.0, -0.0, 1.5, -2.0, np.inf, np.nan], np.float32), 310)
    keys = random.integers(-5, 5, 310) if with_keys else None
    offsets = np.array([0, 7, 7, 300, 310], np.int32)
    found, expected = (segmented_topk(values, offsets, 9, tie_keys=keys, backend=b) for b in ("native", "reference"))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_native_is_not_replaced_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeStatus(False, "no compiler built it", None)
    monkeypatch.setattr("kernels.native.library.status", lambda folder: missing)
    monkeypatch.setattr("kernels.native.library._ready", {})
    with pytest.raises(BackendUnavailableError, match="cannot run here: native backend: no compiler built it"):
        LowpLinear(torch.zeros(4, 8), format="int8", backend="native")
    with pytest.raises(BackendUnavailableError, match="no compiler built it"):
        segmented_topk(np.zeros(1, np.float32), np.array([0, 1]), 1, backend="native")


def test_native_takes_bfloat16_only() -> None:
    with pytest.raises(ValueError, match="weight_NK must be bfloat16"):
        BroadcastGemm(torch.zeros(4, 8), torch.zeros(4, 8), backend="native")
