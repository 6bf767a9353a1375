"""Grouped products of every backend against float64: empty groups, one row, equal groups, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.grouped_gemm import grouped_gemm
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
# rows of each group, outputs, inputs
SHAPES = [
    ([1], 1, 1),
    ([10, 0, 65, 25], 48, 64),
    ([0, 0, 3], 33, 17),
    ([0, 0], 8, 8),
    ([16] * 5, 70, 96),
    ([300], 130, 72),
]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_one_product_a_group(backend: Any, dtype: torch.dtype, index_dtype: torch.dtype, shape: Any) -> None:
    sizes, num_outputs, num_inputs = shape
    x, weight = _random(sum(sizes), num_inputs, dtype=dtype), _random(len(sizes), num_outputs, num_inputs, dtype=dtype)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(index_dtype)
    found = grouped_gemm(x, weight, offsets, backend=backend)
    own = weight.double()[torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))]
    expected = torch.einsum("tk,tnk->tn", x.double(), own)
    magnitude = torch.einsum("tk,tnk->tn", x.double().abs(), own.abs())
    assert largest_error(found, expected, magnitude) <= tolerance(dtype, num_inputs)
    assert found.dtype == dtype
    assert found.shape == (sum(sizes), num_outputs)


@pytest.mark.parametrize(
    ("x", "weight", "offsets", "message"),
    [
        (torch.zeros(3), torch.zeros(1, 2, 3), [0, 3], "x_TK must be"),
        (torch.zeros(3, 4), torch.zeros(1, 2, 3), [0, 3], r"weight_GNK must be float32 \[any, any, 4\]"),
        (torch.zeros(3, 4), torch.zeros(1, 2, 4).bfloat16(), [0, 3], "weight_GNK must be float32"),
        (torch.zeros(3, 4), torch.zeros(2, 2, 4), [0, 3], r"offsets must be int32 or int64 \[3\]"),
        (torch.zeros(3, 4), torch.zeros(1, 2, 4), [0, 2], r"offsets must rise from 0 to 3, are \[0, 2\]"),
        (torch.zeros(3, 4), torch.zeros(2, 2, 4), [0, 4, 3], "offsets must rise"),
        (torch.zeros(3, 4), torch.zeros(1, 2, 4), [1, 3], "offsets must rise"),
    ],
)
def test_a_wrong_call_is_refused(x: Tensor, weight: Tensor, offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_gemm(x, weight, torch.tensor(offsets), backend="torch")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of reference, torch, triton, is 'native'"):
        grouped_gemm(torch.zeros(1, 2), torch.zeros(1, 2, 2), torch.tensor([0, 1]), backend="native")
