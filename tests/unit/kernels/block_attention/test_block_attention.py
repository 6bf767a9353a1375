"""Block attention of every backend against full attention and a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.block_attention import Activation, Backend, block_attention
from tests.unit.kernels.native.support import assert_close, require_native

LENGTHS = {
    "none": [],
    "empty": [0],
    "one": [1],
    "odd": [0, 37, 0, 263, 1, 12, 13],
    "whole blocks": [128, 256],
}
BLOCKS = [(12, 2), (128, 2), (7, 5), (1, 1), (1000, 1), (64, 100)]


def _input(lengths: list[int], num_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    shape = (sum(lengths), num_heads, width)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0)


def _need(backend: Backend) -> None:
    if backend == "native":
        require_native()


def _check(found: Tensor, expected: Tensor, dtype: torch.dtype, longest: int, roundings: int) -> None:
    assert found.dtype == dtype
    assert_close(found, expected, dtype=dtype, reduction=longest, roundings=roundings)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(("block", "window_blocks"), BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.usefixtures("poisoned_memory")
def test_native_equals_reference(
    lengths: list[int], block: int, window_blocks: int, causal: bool, activation: Activation
) -> None:
    require_native()
    q, k, v, offsets = _input(lengths, 2, 16, torch.bfloat16)
    options: dict[str, Any] = {
        "block": block,
        "window_blocks": window_blocks,
        "causal": causal,
        "activation": activation,
    }
    expected = block_attention(q.float(), k.float(), v.float(), offsets, **options, backend="reference")
    found = block_attention(q, k, v, offsets, **options, backend="native")
    # Rounded to bf16: the weights and the answer.
    _check(found, expected, torch.bfloat16, 256, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize(("block", "window_blocks"), [(12, 2), (7, 5), (1000, 1)])
@pytest.mark.usefixtures("poisoned_memory")
def test_torch_equals_reference(
    dtype: torch.dtype, causal: bool, activation: Activation, block: int, window_blocks: int
) -> None:
    q, k, v, offsets = _input(LENGTHS["odd"], 2, 16, dtype)
    options: dict[str, Any] = {
        "block": block,
        "window_blocks": window_blocks,
        "causal": causal,
        "activation": activation,
    }
    expected = block_attention(q.float(), k.float(), v.float(), offsets, **options, backend="reference")
    found = block_attention(q, k, v, offsets, **options, backend="torch")
    # Rounded to the dtype: the scaled queries, the scores (of magnitude 4), the weights, the answer.
    _check(found, expected, dtype, 256, 7)


@pytest.mark.parametrize("width", [1, 2, 15, 33, 64, 80, 128, 256])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_native_takes_any_head_width(width: int, num_heads: int) -> None:
    require_native()
    q, k, v, offsets = _input([5, 150], num_heads, width, torch.bfloat16)
    expected = block_attention(q.float(), k.float(), v.float(), offsets, block=32, window_blocks=2, backend="reference")
    found = block_attention(q, k, v, offsets, block=32, window_blocks=2, backend="native")
    _check(found, expected, torch.bfloat16, 64, 2)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_appending_changes_no_earlier_answer(backend: Backend) -> None:
    _need(backend)
    q, k, v, _ = _input([100], 2, 16, torch.bfloat16)
    whole = block_attention(q, k, v, torch.tensor([0, 100]), block=16, window_blocks=2, backend=backend)
    for length in (1, 17, 31, 99):
        queries, keys, values = (x[:length] for x in (q, k, v))
        offsets = torch.tensor([0, length])
        part = block_attention(queries, keys, values, offsets, block=16, window_blocks=2, backend=backend)
        if backend == "native":
            assert torch.equal(part, whole[:length])
        else:
            assert_close(part, whole[:length], dtype=torch.bfloat16, reduction=32, roundings=4)


@pytest.mark.parametrize("length", [129, 250, 257, 300])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_a_later_block_of_keys_changes_no_earlier_answer(length: int, activation: Activation) -> None:
    # Tiles of 64 queries read keys in blocks of 128: the tile that ends the shorter sequence goes on in the longer one,
    # through keys that its first queries do not see.
    require_native()
    q, k, v, _ = _input([320], 1, 16, torch.bfloat16)
    options: dict[str, Any] = {"block": 1000, "window_blocks": 1, "activation": activation, "backend": "native"}
    whole = block_attention(q, k, v, torch.tensor([0, 320]), **options)
    part = block_attention(q[:length], k[:length], v[:length], torch.tensor([0, length]), **options)
    assert torch.equal(part, whole[:length])


def test_nan_reaches_no_earlier_group_of_queries() -> None:
    require_native()
    q, k, v, offsets = _input([100, 40], 2, 16, torch.bfloat16)
    clean = block_attention(q, k, v, offsets, block=64, window_blocks=2, backend="native")
    k[70], v[70] = torch.nan, torch.nan
    found = block_attention(q, k, v, offsets, block=64, window_blocks=2, backend="native")
    assert torch.isnan(found[70:100]).all()
    assert torch.equal(found[:64], clean[:64])
    assert torch.equal(found[100:], clean[100:])


def test_native_is_equal_for_any_number_of_threads_and_any_neighbours() -> None:
    require_native()
    q, k, v, offsets = _input(LENGTHS["odd"], 4, 32, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(block_attention(q, k, v, offsets, block=48, window_blocks=2, backend="native"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    alone = slice(37, 300)
    found = block_attention(
        q[alone], k[alone], v[alone], torch.tensor([0, 263]), block=48, window_blocks=2, backend="native"
    )
    assert torch.equal(found, answers[0][alone])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_large_scores_do_not_overflow(backend: Backend) -> None:
    _need(backend)
    q, k, v, offsets = _input([40], 1, 16, torch.bfloat16)
    for activation in ("softmax", "silu"):
        options: dict[str, Any] = {"block": 8, "window_blocks": 2, "scale": 100.0, "activation": activation}
        expected = block_attention(q.float(), k.float(), v.float(), offsets, **options, backend="reference")
        found = block_attention(q, k, v, offsets, **options, backend=backend)
        assert torch.isfinite(found.float()).all()
        if backend == "native":
            _check(found, expected, torch.bfloat16, 16 * 16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 2)}, r"q must be \[T, H, K\]"),
        ({"q": torch.zeros(4, 2, 8, dtype=torch.float16)}, "q must be"),
        ({"k": torch.zeros(3, 2, 8)}, r"k must be torch.float32 \[4, 2, 8\], is torch.float32 \[3, 2, 8\]"),
        ({"v": torch.zeros(4, 2, 8).bfloat16()}, "v must be torch.float32"),
        ({"offsets": torch.tensor([0, 3])}, "offsets must ascend from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, "offsets must ascend"),
        ({"offsets": torch.tensor([0, 4], dtype=torch.int32)}, "offsets must be torch.int64"),
        ({"block": 0}, r"block must be a whole number in \[1, 2147483648\], is 0"),
        ({"window_blocks": 0}, "window_blocks must be a whole number"),
        ({"activation": "gelu"}, "activation must be softmax or silu, is 'gelu'"),
        ({"scale": 0.0}, r"scale must be in \[1e-30, 1e\+30\], is 0"),
        ({"backend": "triton"}, "backend must be one of"),
        ({"backend": "native"}, "q must be"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(4, 2, 8) for name in "qkv"}
    given |= {"offsets": torch.tensor([0, 4]), "block": 2, "window_blocks": 2, "backend": "reference"}
    with pytest.raises(ValueError, match=message):
        block_attention(**{**given, **changes})
