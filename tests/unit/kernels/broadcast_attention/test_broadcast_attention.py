"""Broadcast attention of every backend against float64: ragged keys, empty histories, odd widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.broadcast_attention import HEAD_WIDTH_MAX, broadcast_attention
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
# candidates, queries, heads, head width, keys of each request
SHAPES = [
    (1, 1, 1, 16, [1]),
    (7, 3, 2, 24, [65, 0, 1, 130]),
    (33, 4, 1, 64, [64]),
    (0, 2, 2, 16, [5, 3]),
    (50, 2, 1, 128, [0, 90]),
    (5, 40, 1, 32, [33, 7, 12]),
]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _truth(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, index: Tensor, activation: str, scale: float
) -> tuple[Tensor, Tensor, float]:
    """Return the answer in float64, the magnitude of its terms, and the largest score."""
    out, size, largest = torch.zeros(q.shape).double(), torch.zeros(q.shape).double(), 0.0
    for request in set(index.tolist()):
        keys, mine = slice(int(ends[request]), int(ends[request + 1])), index == request
        if keys.start == keys.stop:
            continue
        scores = torch.einsum("cqhk,thk->cqht", q[mine].double(), k[keys].double())
        largest = max(largest, float(scores.abs().max()) * (scale if activation == "softmax" else 1.0))
        weights = torch.softmax(scores * scale, -1) if activation == "softmax" else scores * scores.sigmoid() * scale
        out[mine] = torch.einsum("cqht,thk->cqhk", weights, v[keys].double())
        size[mine] = torch.einsum("cqht,thk->cqhk", weights.abs(), v[keys].double().abs())
    return out, size, largest


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_equals_attention_of_each_candidate_alone(
    backend: Any, dtype: torch.dtype, shape: Any, activation: Any
) -> None:
    num_candidates, num_queries, num_heads, head_width, lengths = shape
    ends = _offsets(lengths)
    q = _random(num_candidates, num_queries, num_heads, head_width, dtype=dtype)
    k, v = (_random(int(ends[-1]), num_heads, head_width, dtype=dtype, seed=seed) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, len(lengths), (num_candidates,), generator=generator)
    scale = 0.05 if activation == "silu" else head_width**-0.5
    given = None if len(lengths) == 1 else index
    out = broadcast_attention(
        q, k, v, ends, given, activation=activation, scale=scale if activation == "silu" else None, backend=backend
    )
    expected, magnitude, largest = _truth(q, k, v, ends, index, activation, scale)
    # A score that is rounded moves its weight by as much as the score is large.
    roundings = 3 + int(largest) if backend == "torch" else 3
    length = (head_width + max(lengths)) * (1 + int(largest)) ** 2
    assert largest_error(out, expected, magnitude) <= tolerance(dtype, length, roundings=roundings)
    assert out.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_keys_are_jagged_ones_of_equal_length(backend: Any) -> None:
    q, k, v = _random(6, 2, 2, 16), _random(3, 5, 2, 16, seed=1), _random(3, 5, 2, 16, seed=2)
    index = torch.tensor([2, 0, 0, 1, 2, 0], dtype=torch.int32)
    dense = broadcast_attention(q, k, v, None, index, backend=backend)
    jagged = broadcast_attention(q, k.flatten(0, 1), v.flatten(0, 1), _offsets([5, 5, 5]), index, backend=backend)
    torch.testing.assert_close(dense, jagged, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_an_empty_history_answers_zero(backend: Any, activation: Any) -> None:
    q, empty = _random(3, 2, 2, 16), torch.zeros(0, 2, 16)
    out = broadcast_attention(q, empty, empty, _offsets([0]), activation=activation, scale=1.0, backend=backend)
    torch.testing.assert_close(out, torch.zeros_like(q), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: Any) -> None:
    q, k, v = 100 * _random(4, 1, 1, 16), 100 * _random(70, 1, 16, seed=1), _random(70, 1, 16, seed=2)
    out = broadcast_attention(q, k, v, _offsets([70]), backend=backend)
    best = torch.einsum("cqhk,thk->ct", q.double(), k.double()).argmax(1)
    # Scores are thousands apart: one key takes all the weight.
    assert largest_error(out[:, 0, 0], v[best, 0]) <= tolerance(torch.float32, 16)


@pytest.mark.interpret
def test_the_plan_covers_every_row_once() -> None:
    from kernels.gpu.attention import plan_tiles

    index = torch.tensor([3, 0, 3, 3, 1, 3])
    order, first_row, tile_request, first_tile = plan_tiles(index, 5, num_queries=2, tile_rows=4)
    assert order.tolist() == [1, 4, 0, 2, 3, 5]
    assert first_row.tolist() == [0, 1, 2, 2, 6, 6]
    assert tile_request.tolist() == [0, 1, 3, 3, 5, 5, 5, 5]
    assert first_tile.tolist() == [0, 1, 2, 2, 4]


_Q, _K = torch.zeros(2, 1, 2, 16), torch.zeros(5, 2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_CQHK": torch.zeros(2, 2, 16)}, "q_CQHK must be"),
        ({"k_THK": torch.zeros(5, 3, 16)}, r"k_THK with key_offsets must be float32 \[any, 2, 16\]"),
        ({"k_THK": torch.zeros(5, 2, 16).bfloat16()}, "k_THK with key_offsets must be float32"),
        ({"v_THK": torch.zeros(4, 2, 16)}, r"v_THK must be float32 \[5, 2, 16\]"),
        ({"key_offsets": None}, "k_THK without key_offsets"),
        ({"key_offsets": torch.tensor([0, 4])}, r"key_offsets must rise from 0 to 5, are \[0, 4\]"),
        ({"key_offsets": torch.tensor([0, 6, 5]), "candidate_to_request_C": torch.tensor([0, 1])}, "must rise"),
        ({"key_offsets": torch.zeros(0).int()}, "key_offsets must be .B . 1., is empty"),
        ({"key_offsets": torch.tensor([0, 2, 5])}, "None for one request only"),
        ({"candidate_to_request_C": torch.tensor([0, 1])}, r"must be in \[0, 1\), holds 0 to 1"),
        ({"activation": "gelu"}, "activation must be one of softmax, silu"),
        ({"activation": "silu"}, "scale must be given"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_a_wrong_call_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q_CQHK": _Q, "k_THK": _K, "v_THK": _K, "key_offsets": torch.tensor([0, 5]), "backend": "torch",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        broadcast_attention(**{**given, **changes})


@pytest.mark.interpret
def test_triton_refuses_wider_heads() -> None:
    wide = torch.zeros(1, 1, 1, HEAD_WIDTH_MAX + 1)
    with pytest.raises(ValueError, match="head width of at most 128, got 129"):
        broadcast_attention(wide, wide[0], wide[0], torch.tensor([0, 1]), backend="triton")
