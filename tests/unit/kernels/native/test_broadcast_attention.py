"""Native attention of candidates to their requests' keys, and the packing of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native import broadcast_attention, pack_keys
from tests.unit.kernels.native.support import assert_close, require_native

# candidates, queries, heads, head width, keys of each request
SHAPES = [
    (5, 3, 2, 16, [70]),
    (1, 1, 1, 1, [1]),
    (0, 2, 2, 8, [3]),
    (3, 0, 2, 8, [3]),
    (40, 2, 4, 64, [300, 0, 63, 64, 65]),
    (13, 2, 1, 128, [511, 513]),
    (7, 1, 3, 5, [33]),
    (31, 5, 2, 32, [2048]),
    (6, 1, 1, 256, [257]),
    (4, 2, 2, 18, [0]),
]


@pytest.fixture(autouse=True)
def _native() -> None:
    require_native()


def _make(shape: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_candidates, num_queries, num_heads, width, lengths = shape
    generator = torch.Generator().manual_seed(num_candidates + sum(lengths))
    q = torch.randn(num_candidates, num_queries, num_heads, width, generator=generator).bfloat16()
    k, v = (torch.randn(sum(lengths), num_heads, width, generator=generator).bfloat16() for _ in range(2))
    request = torch.randint(0, len(lengths), (num_candidates,), generator=generator, dtype=torch.int32)
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0), request


def _truth(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, request: Tensor, activation: str) -> Tensor:
    out = torch.zeros(q.shape)
    for r in range(len(offsets) - 1):
        own = request == r
        keys, values = (x[offsets[r] : offsets[r + 1]].float() for x in (k, v))
        scores = torch.einsum("cqhd,khd->chqk", q[own].float(), keys) * q.shape[3] ** -0.5
        weights = scores.softmax(-1) if activation == "softmax" else torch.nn.functional.silu(scores)
        out[own] = torch.einsum("chqk,khd->cqhd", weights, values)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("poisoned_memory")
def test_equals_attention_a_candidate(shape: Any, activation: Any, out_dtype: torch.dtype) -> None:
    q, k, v, offsets, request = _make(shape)
    found = broadcast_attention(q, k, v, request, offsets=offsets, activation=activation, out_dtype=out_dtype)
    assert found.dtype == out_dtype
    # Rounded to bf16: the weights, and the answer.
    assert_close(
        found,
        _truth(q, k, v, offsets, request, activation),
        dtype=torch.bfloat16,
        reduction=max(shape[3], *shape[4], 1),
        roundings=2,
    )


def test_padded_keys_with_a_mask_equal_jagged_keys() -> None:
    q, k, v, offsets, request = _make((9, 2, 2, 16, [20, 20, 20]))
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1] = False
    padded_k, padded_v = (x.view(3, 20, 2, 16) for x in (k, v))
    kept = mask.flatten()
    lengths = torch.zeros(4, dtype=torch.int64)
    torch.cumsum(mask.sum(1), 0, out=lengths[1:])
    jagged = broadcast_attention(q, k[kept], v[kept], request, offsets=lengths)
    assert torch.equal(broadcast_attention(q, pack_keys(padded_k, padded_v, mask=mask), None, request), jagged)
    assert (jagged[request == 1] == 0).all()
    whole = broadcast_attention(q, padded_k, padded_v, request)
    assert torch.equal(whole, broadcast_attention(q, k, v, request, offsets=offsets))


def test_an_answer_does_not_depend_on_batch_or_threads() -> None:
    q, k, v, offsets, request = _make((150, 3, 2, 32, [300, 700, 64]))
    packed = pack_keys(k, v, offsets=offsets)
    whole = broadcast_attention(q, packed, None, request)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(broadcast_attention(q, packed, None, request), whole)
    finally:
        torch.set_num_threads(before)
    for cut in (1, 7, 50):
        assert torch.equal(broadcast_attention(q[:cut].contiguous(), packed, None, request[:cut]), whole[:cut])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2))
    assert torch.equal(broadcast_attention(q[order], packed, None, request[order]), whole[order])


def test_scores_of_any_size_give_finite_answers() -> None:
    q, k, v, offsets, request = _make((5, 2, 2, 16, [700]))
    for factor in (1e-3, 30.0, 1e9, 1e18):
        found = broadcast_attention((q * factor).bfloat16(), k, v, request, offsets=offsets)
        assert torch.isfinite(found.float()).all()
    # With huge scores the largest takes all the weight.
    scores = torch.einsum("qhd,khd->qhk", q[0].float(), k.float())
    best = v.float()[scores.argmax(-1), torch.arange(2)[None]]
    assert torch.equal(broadcast_attention((q * 1e18).bfloat16(), k, v, request, offsets=offsets)[0].float(), best)


def test_nan_shows_where_it_is_and_nowhere_else() -> None:
    q, k, v, offsets, request = _make((20, 1, 1, 16, [30, 30]))
    clean = broadcast_attention(q, k, v, request, offsets=offsets)
    q[3] = torch.nan
    found = broadcast_attention(q, k, v, request, offsets=offsets)
    others = torch.arange(20) != 3
    assert torch.isnan(found[3]).all()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 2, 2, 16)}, r"q must be torch.bfloat16 \[\?, \?, 2, 16\], is torch.float32"),
        ({"q": torch.zeros(3, 2, 2, 8).bfloat16()}, "q must be"),
        ({"q": torch.zeros(3, 2, 16, 2).bfloat16().transpose(2, 3)}, "q must be contiguous, has strides"),
        ({"k": torch.zeros(7, 2, 16)}, "keys must be torch.bfloat16"),
        ({"v": torch.zeros(6, 2, 16).bfloat16()}, r"values must be torch.bfloat16 \[7, 2, 16\]"),
        ({"v": None}, "v must be given, is None"),
        ({"offsets": torch.tensor([0, 3, 8])}, "offsets must ascend from 0 to 7"),
        ({"offsets": torch.tensor([0, 3, 7], dtype=torch.int32)}, "offsets must be torch.int64"),
        ({"candidate_to_request": None}, "candidate_to_request must be given for 2 requests"),
        ({"candidate_to_request": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"must be in \[0, 2\)"),
        ({"candidate_to_request": torch.tensor([0, 1, 1])}, "candidate_to_request must be torch.int32"),
        ({"scale": float("nan")}, "scale must be in"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"out_dtype": torch.float16}, "out_dtype must be"),
        ({"q": torch.zeros(3, 2, 2, 16).bfloat16().to("meta")}, "q must be on the CPU, is on meta"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(3, 2, 2, 16).bfloat16(),
        "k": torch.zeros(7, 2, 16).bfloat16(),
        "v": torch.zeros(7, 2, 16).bfloat16(),
        "offsets": torch.tensor([0, 3, 7]),
        "candidate_to_request": torch.tensor([0, 1, 1], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        broadcast_attention(**{**given, **changes})


def test_packed_keys_come_without_values_and_offsets() -> None:
    q, k, v, offsets, request = _make(SHAPES[0])
    with pytest.raises(ValueError, match="v and offsets must be None with packed keys"):
        broadcast_attention(q, pack_keys(k, v, offsets=offsets), v, request)
    with pytest.raises(ValueError, match=r"head width must be in \[1, 256\], is 257"):
        pack_keys(torch.zeros(1, 1, 1, 257).bfloat16(), torch.zeros(1, 1, 1, 257).bfloat16())
    with pytest.raises(ValueError, match=r"mask must be torch.bool \[1, 4\]"):
        pack_keys(torch.zeros(1, 4, 1, 8).bfloat16(), torch.zeros(1, 4, 1, 8).bfloat16(), mask=torch.ones(1, 4))
