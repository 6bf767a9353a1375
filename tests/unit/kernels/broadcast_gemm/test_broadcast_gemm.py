"""Every backend against float32 truth: odd sizes, no candidate, one, many requests in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backends import BackendUnavailableError
from kernels.broadcast_gemm import BroadcastGemm, BroadcastTokenGemm
from kernels.packed_linear import PackedLinear, probe_dtypes
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = [pytest.param("torch"), pytest.param("triton", marks=pytest.mark.interpret)]
# candidates, outputs, candidate inputs, request inputs, requests
SHAPES = [(1, 1, 1, 1, 1), (33, 65, 70, 19, 3), (130, 128, 64, 96, 5), (0, 17, 8, 8, 2), (64, 300, 129, 1, 70)]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _index(num_candidates: int, num_requests: int, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(num_candidates)
    return torch.randint(0, num_requests, (num_candidates,), generator=generator).to(dtype)


def _truth(op: BroadcastGemm, x_CK: Tensor, x_BR: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the layer over concatenated inputs in float64, and the magnitude of its terms."""
    rows = torch.zeros(len(x_CK), dtype=torch.int64) if index is None else index.long()
    both = torch.cat([x_CK, x_BR[rows]], 1).double()
    weight = torch.cat([op.weight_NK, op.request_weight_NR], 1).double()
    out = both @ weight.T
    return out.relu() if op.activation == "relu" else out, both.abs() @ weight.abs().T


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_equals_the_layer_over_concatenated_inputs(
    backend: Any, dtype: torch.dtype, shape: Any, activation: Any
) -> None:
    num_candidates, num_outputs, num_inputs, num_request_inputs, num_requests = shape
    op = BroadcastGemm(
        _random(num_outputs, num_inputs, dtype=dtype),
        _random(num_outputs, num_request_inputs, dtype=dtype, seed=1),
        activation=activation,
        backend=backend,
    )
    x_CK = _random(num_candidates, num_inputs, dtype=dtype, seed=2)
    x_BR = _random(num_requests, num_request_inputs, dtype=dtype, seed=3)
    index = None if num_requests == 1 else _index(num_candidates, num_requests)
    out_CN = op(x_CK, op.request_part(x_BR), index)
    expected, magnitude = _truth(op, x_CK, x_BR, index)
    assert out_CN.dtype == dtype
    torch.testing.assert_close(op.both(x_CK, x_BR, index), out_CN, rtol=0, atol=0)
    assert largest_error(out_CN, expected, magnitude) <= tolerance(dtype, num_inputs + num_request_inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    op = BroadcastGemm(
        _random(96, 70, dtype=dtype), _random(96, 33, dtype=dtype, seed=1), activation="relu", backend="torch"
    )
    x_CK, part_BN = _random(40, 70, dtype=dtype), op.request_part(_random(3, 33, dtype=dtype))
    index = _index(40, 3, torch.int64)
    whole = op(x_CK, part_BN, index)
    for rows in (slice(0, 1), slice(7, 20), slice(39, 40)):
        torch.testing.assert_close(op(x_CK[rows], part_BN, index[rows]), whole[rows], rtol=0, atol=0)
    alone = torch.cat([op(x_CK[i : i + 1], part_BN[int(r)][None]) for i, r in enumerate(index)])
    torch.testing.assert_close(alone, whole, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16, 1), (7, 9, 35, 11, 32, 3), (40, 70, 33, 20, 24, 2), (0, 4, 5, 6, 16, 2)]
)
@pytest.mark.parametrize("is_token_major", [False, True])
def test_token_form_equals_the_map_over_concatenated_tokens(
    backend: Any, dtype: torch.dtype, shape: Any, is_token_major: bool
) -> None:
    num_candidates, num_outputs, num_inputs, num_request_inputs, width, num_requests = shape
    weight_MK = _random(num_outputs, num_inputs, dtype=dtype)
    request_weight_MR = _random(num_outputs, num_request_inputs, dtype=dtype, seed=1)
    op = BroadcastTokenGemm(weight_MK, request_weight_MR, backend=backend)
    x_BRD = _random(num_requests, num_request_inputs, width, dtype=dtype, seed=3)
    if is_token_major:
        x_CKD = _random(num_inputs, num_candidates, width, dtype=dtype, seed=2).transpose(0, 1)
    else:
        x_CKD = _random(num_candidates, num_inputs, width, dtype=dtype, seed=2)
    index = None if num_requests == 1 else _index(num_candidates, num_requests)
    out_CMD = op(x_CKD, op.request_part(x_BRD), index)
    rows = torch.zeros(num_candidates, dtype=torch.int64) if index is None else index.long()
    both = torch.cat([x_CKD, x_BRD[rows]], 1).double()
    weight = torch.cat([weight_MK, request_weight_MR], 1).double()
    error = largest_error(out_CMD, weight @ both, weight.abs() @ both.abs())
    # The stock product is rounded to its own type before the part is added.
    assert error <= tolerance(dtype, num_inputs + num_request_inputs, roundings=2)
    assert out_CMD.shape == (num_candidates, num_outputs, width)
    assert backend == "reference" or out_CMD.transpose(0, 1).is_contiguous() == (
        is_token_major or out_CMD.numel() <= width
    )


def _op(backend: Any = "torch", **changes: Any) -> BroadcastGemm:
    given: dict[str, Any] = {"weight_NK": torch.zeros(4, 3), "request_weight_NR": torch.zeros(4, 2)} | changes
    return BroadcastGemm(given.pop("weight_NK"), given.pop("request_weight_NR"), backend=backend, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_NK": torch.zeros(4)}, r"weight_NK must be .* \[any, any\], is float32 \[4\]"),
        ({"weight_NK": torch.zeros(4, 3, dtype=torch.int32)}, "weight_NK must be float32 or"),
        ({"request_weight_NR": torch.zeros(5, 2)}, r"request_weight_NR must be float32 \[4, any\]"),
        ({"request_weight_NR": torch.zeros(4, 2).bfloat16()}, "request_weight_NR must be float32"),
        ({"activation": "gelu"}, "activation must be one of none, relu, is 'gelu'"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_a_wrong_layer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _op(**changes)


@pytest.mark.parametrize(
    ("x", "part", "index", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(1, 4), None, r"x_CK must be float32 \[any, 3\]"),
        (torch.zeros(2, 3).bfloat16(), torch.zeros(1, 4), None, "x_CK must be float32"),
        (torch.zeros(2, 3), torch.zeros(1, 5), None, r"part_BN must be float32 \[any, 4\]"),
        (torch.zeros(2, 3), torch.zeros(2, 4), None, "may be None for one request only, there are 2"),
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(3).int(), r"must be int32 or int64 \[2\]"),
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.tensor([0, 2]), r"must be in \[0, 2\), holds 0 to 2"),
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.tensor([-1, 1]), r"must be in \[0, 2\), holds -1 to 1"),
    ],
)
def test_a_wrong_call_is_refused(x: Tensor, part: Tensor, index: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _op()(x, part, index)


def test_triton_is_not_replaced_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailableError, match="needs tensors on a GPU, they are on cpu"):
        _op("triton")


def test_the_probe_names_the_faster_dtype() -> None:
    probe = probe_dtypes(size=64, rounds=1)
    assert probe.bf16_gflops > 0
    assert probe.dtype == (torch.bfloat16 if probe.bf16_gflops > probe.fp32_gflops else torch.float32)


def test_an_unpacked_linear_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = _random(9, 7, dtype=torch.float32), _random(5, 7, dtype=torch.float32), torch.ones(9)
    plain = PackedLinear(weight.half())
    assert not plain.is_packed
    expected = PackedLinear(weight)(x, bias, "relu")
    assert largest_error(plain(x.half(), bias, "relu"), expected) <= tolerance(torch.float16, 7, roundings=3)
