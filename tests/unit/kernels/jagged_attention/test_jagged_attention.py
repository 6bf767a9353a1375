"""Jagged attention of every backend against float64: empty, one-event and long sequences, fewer queries than keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.jagged_attention import HEAD_WIDTH_MAX, jagged_attention
from kernels.native import status
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
needs_native = pytest.mark.skipif(not status().available, reason=status().reason or "native")
# heads, head width, queries of each sequence, keys of each sequence
SHAPES = [
    (1, 16, [1], [1]),
    (2, 24, [65, 0, 1, 70], [65, 3, 1, 130]),
    (1, 64, [64, 64], [64, 64]),
    (2, 16, [0, 0], [5, 0]),
    (1, 128, [3, 9], [0, 90]),
    (3, 32, [130, 7], [130, 12]),
]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _inputs(shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, head_width, queries, keys = shape
    q = _random(sum(queries), num_heads, head_width, dtype=dtype)
    k, v = (_random(sum(keys), num_heads, head_width, dtype=dtype, seed=seed) for seed in (1, 2))
    return q, k, v, _offsets(queries), _offsets(keys)


def _truth(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the answer in float64, one query after another, and the magnitude of its terms."""
    out, size = torch.zeros(q.shape).double(), torch.zeros(q.shape).double()
    for sequence in range(len(query_ends) - 1):
        first, last = int(query_ends[sequence]), int(query_ends[sequence + 1])
        begin, end = int(key_ends[sequence]), int(key_ends[sequence + 1])
        for row in range(first, last):
            stop = end - (last - 1 - row) if causal else end
            if stop <= begin:
                continue
            keys, values = k[begin:stop].double(), v[begin:stop].double()
            weights = torch.softmax(torch.einsum("hk,shk->hs", q[row].double(), keys) * q.shape[2] ** -0.5, -1)
            out[row] = torch.einsum("hs,shk->hk", weights, values)
            size[row] = torch.einsum("hs,shk->hk", weights, values.abs())
    return out, size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_attention_of_each_query_alone(backend: Any, dtype: torch.dtype, shape: Any, causal: bool) -> None:
    given = _inputs(shape, dtype)
    out = jagged_attention(*given, causal=causal, backend=backend)
    expected, magnitude = _truth(*given, causal)
    # Scores are within 6 here; one that is rounded moves its weight by as much as it is large.
    roundings = 9 if backend == "torch" else 3
    length = 16 * (shape[1] + max(shape[3]))
    assert largest_error(out, expected, magnitude) <= tolerance(dtype, length, roundings=roundings)
    assert out.dtype == dtype


@needs_native
@pytest.mark.parametrize(
    ("causal", "shape"), [(False, SHAPES[1]), (True, SHAPES[2]), (True, (2, 24, [65, 0, 1], [65, 0, 1]))]
)
def test_native_equals_attention_of_each_query_alone(causal: bool, shape: Any) -> None:
    given = _inputs(shape, torch.bfloat16)
    out = jagged_attention(*given, causal=causal, backend="native")
    expected, magnitude = _truth(*given, causal)
    assert largest_error(out, expected, magnitude) <= tolerance(torch.bfloat16, 2_000, roundings=9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_queries_ask_every_sequence(backend: Any) -> None:
    q, k, v = _random(3, 2, 16), _random(9, 2, 16, seed=1), _random(9, 2, 16, seed=2)
    ends = _offsets([4, 0, 5])
    out = jagged_attention(q, k, v, None, ends, backend=backend)
    given = jagged_attention(q.repeat(3, 1, 1), k, v, _offsets([3, 3, 3]), ends, backend=backend)
    torch.testing.assert_close(out, given, rtol=0, atol=0)
    assert not out[3:6].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_appended_queries_answer_as_in_the_whole_sequence(backend: Any) -> None:
    q, k, v, ends, _ = _inputs((2, 16, [70, 33], [70, 33]), torch.float32)
    whole = jagged_attention(q, k, v, ends, ends, causal=True, backend=backend)
    newest = torch.cat([q[62:70], q[70 + 31 :]])
    appended = jagged_attention(newest, k, v, _offsets([8, 2]), ends, causal=True, backend=backend)
    expected = torch.cat([whole[62:70], whole[70 + 31 :]])
    assert largest_error(appended, expected) <= tolerance(torch.float32, 16 * 86)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: Any) -> None:
    q, k, v = 100 * _random(4, 1, 16), 100 * _random(70, 1, 16, seed=1), _random(70, 1, 16, seed=2)
    out = jagged_attention(q, k, v, _offsets([4]), _offsets([70]), backend=backend)
    best = torch.einsum("qhk,shk->qs", q.double(), k.double()).argmax(1)
    # Scores are thousands apart: one key takes all the weight.
    assert largest_error(out[:, 0], v[best, 0]) <= tolerance(torch.float32, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_offsets": _offsets([3])}, "key_offsets must rise from 0 to 4"),
        ({"query_offsets": _offsets([1, 1])}, "query_offsets must be as many as key_offsets"),
        ({"query_offsets": None, "causal": True}, "causal needs query_offsets"),
        ({"v_SHK": torch.zeros(4, 1, 8)}, "v_SHK must be"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    q, k = torch.zeros(2, 1, 16), torch.zeros(4, 1, 16)
    given = {"q_THK": q, "k_SHK": k, "v_SHK": k, "query_offsets": _offsets([2]), "key_offsets": _offsets([4])}
    with pytest.raises(ValueError, match=message):
        jagged_attention(**{**given, "backend": "torch", **changes})


@pytest.mark.interpret
def test_triton_refuses_wide_heads() -> None:
    wide = torch.zeros(2, 1, HEAD_WIDTH_MAX + 1)
    with pytest.raises(ValueError, match="head width of at most"):
        jagged_attention(wide, wide, wide, _offsets([2]), _offsets([2]), backend="triton")


@needs_native
def test_native_refuses_causal_with_fewer_queries_than_keys() -> None:
    q, k = torch.zeros(2, 1, 16).bfloat16(), torch.zeros(4, 1, 16).bfloat16()
    with pytest.raises(ValueError, match="as many keys as queries"):
        jagged_attention(q, k, k, _offsets([2]), _offsets([4]), causal=True, backend="native")
