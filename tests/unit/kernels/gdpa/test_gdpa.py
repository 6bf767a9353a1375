"""Generalised dot-product attention of every backend against float64: ragged keys, none, one, odd widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.broadcast_attention import broadcast_attention
from kernels.gdpa import HEAD_WIDTH_MAX, gdpa
from kernels.native import status
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
ACTIVATIONS = ["relu", "gelu", "silu", "identity"]
# rows, queries, heads, head width, keys of each request
SHAPES = [
    (1, 1, 1, 16, [1]),
    (7, 3, 2, 24, [65, 0, 1, 130]),
    (0, 2, 2, 16, [5, 3]),
    (130, 1, 1, 64, [64]),
    (50, 1, 1, 128, [0, 90]),
]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _act(scores: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return scores.clamp(min=0)
    if activation == "gelu":
        return 0.5 * scores * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (scores + 0.044715 * scores**3)))
    return scores * scores.sigmoid() if activation == "silu" else scores


def _inputs(shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_queries, num_heads, head_width, lengths = shape
    q = _random(num_rows, num_queries, num_heads, head_width, dtype=dtype)
    k, v = (_random(sum(lengths), num_heads, head_width, dtype=dtype, seed=seed) for seed in (1, 2))
    index = torch.randint(0, len(lengths), (num_rows,), generator=torch.Generator().manual_seed(3))
    return q, k, v, _offsets(lengths), index


def _truth(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, index: Tensor, activation: str, tau: float
) -> tuple[Tensor, Tensor]:
    """Return the answer in float64, and the magnitude of its terms, the terms of the scores included."""
    out, size = torch.zeros(q.shape).double(), torch.zeros(q.shape).double()
    for row, request in enumerate(index.tolist()):
        keys = k[ends[request] : ends[request + 1]].double()
        values = v[ends[request] : ends[request + 1]].double()
        scores = torch.einsum("qhk,mhk->qhm", q[row].double(), keys) / tau
        terms = torch.einsum("qhk,mhk->qhm", q[row].double().abs(), keys.abs()) / tau
        out[row] = torch.einsum("qhm,mhk->qhk", _act(scores, activation), values)
        size[row] = torch.einsum("qhm,mhk->qhk", terms, values.abs())
    return out, size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_each_row_alone(backend: Any, dtype: torch.dtype, shape: Any, activation: Any) -> None:
    q, k, v, ends, index = _inputs(shape, dtype)
    given = None if len(ends) == 2 else index
    out = gdpa(q, k, v, ends, given, activation=activation, tau=1.5, backend=backend)
    expected, magnitude = _truth(q, k, v, ends, index, activation, 1.5)
    assert largest_error(out, expected, magnitude) <= tolerance(dtype, shape[3] + max(shape[4]), roundings=3)
    assert out.dtype == dtype


@pytest.mark.skipif(not status().available, reason=status().reason or "native")
@pytest.mark.parametrize("shape", SHAPES)
def test_native_equals_each_row_alone(shape: Any) -> None:
    q, k, v, ends, index = _inputs(shape, torch.bfloat16)
    out = gdpa(q, k, v, ends, None if len(ends) == 2 else index, activation="silu", tau=1.5, backend="native")
    expected, magnitude = _truth(q, k, v, ends, index, "silu", 1.5)
    assert largest_error(out, expected, magnitude) <= tolerance(torch.bfloat16, shape[3] + max(shape[4]), roundings=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_identity_is_the_factored_map(backend: Any) -> None:
    q, k, v = _random(40, 1, 1, 16), _random(6, 1, 16, seed=1), _random(6, 1, 16, seed=2)
    out = gdpa(q, k, v, _offsets([6]), activation="identity", backend=backend)
    expected = q[:, 0, 0].double() @ (k[:, 0].double().T @ v[:, 0].double())
    assert largest_error(out[:, 0, 0], expected) <= tolerance(torch.float32, 16 * 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_relu_is_a_feed_forward_network(backend: Any) -> None:
    q, k, v = _random(40, 1, 1, 16), _random(70, 1, 16, seed=1), _random(70, 1, 16, seed=2)
    out = gdpa(q, k, v, _offsets([70]), activation="relu", backend=backend)
    expected = functional.linear(q[:, 0, 0].double(), k[:, 0].double()).relu() @ v[:, 0].double()
    assert largest_error(out[:, 0, 0], expected) <= tolerance(torch.float32, 16 * 70)


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_one_interface_with_broadcast_attention(backend: Any) -> None:
    q, k, v, ends, index = _inputs(SHAPES[1], torch.float32)
    out = gdpa(q, k, v, ends, index, activation="silu", backend=backend)
    other = broadcast_attention(q, k, v, ends, index, activation="silu", scale=1.0, backend=backend)
    assert largest_error(out, other) <= tolerance(torch.float32, 24 + 130)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_keys_are_jagged_ones_of_equal_length(backend: Any) -> None:
    q, k, v = _random(6, 2, 2, 16), _random(3, 5, 2, 16, seed=1), _random(3, 5, 2, 16, seed=2)
    index = torch.tensor([2, 0, 0, 1, 2, 0], dtype=torch.int32)
    dense = gdpa(q, k, v, None, index, activation="relu", backend=backend)
    jagged = gdpa(q, k.flatten(0, 1), v.flatten(0, 1), _offsets([5, 5, 5]), index, activation="relu", backend=backend)
    torch.testing.assert_close(dense, jagged, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau": 0.0}, "tau must be in"),
        ({"activation": "softmax"}, "activation must be one of"),
        ({"key_offsets": _offsets([3])}, "key_offsets must rise from 0 to 4"),
        ({"row_to_request_C": torch.tensor([0, 1])}, r"row_to_request_C must be in \[0, 1\)"),
        ({"v_MHK": torch.zeros(4, 1, 8)}, "v_MHK must be"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    given = {"q_CQHK": torch.zeros(2, 1, 1, 16), "k_MHK": torch.zeros(4, 1, 16), "v_MHK": torch.zeros(4, 1, 16)}
    defaults = {"key_offsets": _offsets([4]), "activation": "relu", "backend": "torch"}
    with pytest.raises(ValueError, match=message):
        gdpa(**{**given, **defaults, **changes})


@pytest.mark.interpret
def test_triton_refuses_wide_heads() -> None:
    wide = torch.zeros(1, 2, 1, HEAD_WIDTH_MAX + 1)
    with pytest.raises(ValueError, match="head width of at most"):
        gdpa(wide, wide, wide, activation="relu", backend="triton")
