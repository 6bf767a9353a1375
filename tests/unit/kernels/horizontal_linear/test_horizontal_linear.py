"""Merged and batched linear layers of every backend against float64: odd shapes, no rows, one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.horizontal_linear import LinearBatch, MergedLinear
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
DTYPES = [torch.float32, torch.bfloat16]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _check(found: Tensor, x: Tensor, weight: Tensor) -> None:
    wide, truth = x.double(), weight.double()
    assert found.shape == (len(x), len(weight))
    assert found.dtype == x.dtype
    assert largest_error(found, wide @ truth.T, wide.abs() @ truth.abs().T) <= tolerance(x.dtype, x.shape[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_inputs", "sizes"), [(1, 1, [1]), (33, 70, [5, 64, 1]), (0, 8, [3, 3])])
def test_merged_layers_equal_each_layer(
    backend: Any, dtype: torch.dtype, num_rows: int, num_inputs: int, sizes: list[int]
) -> None:
    weights = [_random(size, num_inputs, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    x = _random(num_rows, num_inputs, dtype=dtype)
    outputs = MergedLinear(weights, backend=backend)(x)
    for found, weight in zip(outputs, weights, strict=True):
        _check(found, x, weight)
    storages = {output.untyped_storage().data_ptr() for output in outputs}
    assert len(storages) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1, 1)],
        [(16, 24, 32)] * 4,
        [(16, 24, 32), (16, 24, 32), (5, 24, 32), (0, 7, 9), (70, 65, 33)],
        [(0, 4, 4), (0, 4, 4)],
    ],
)
def test_batched_layers_equal_each_layer(backend: Any, dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> None:
    weights = [_random(n, k, dtype=dtype, seed=i) for i, (_, n, k) in enumerate(shapes)]
    inputs = [_random(m, k, dtype=dtype, seed=10 + i) for i, (m, _, k) in enumerate(shapes)]
    for found, x, weight in zip(LinearBatch(weights, backend=backend)(inputs), inputs, weights, strict=True):
        _check(found, x, weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_may_be_parts_of_wider_rows(backend: Any) -> None:
    wide = _random(20, 64)
    weights = [_random(8, 24), _random(8, 40, seed=1)]
    for found, x, weight in zip(
        LinearBatch(weights, backend=backend)([wide[:, :24], wide[:, 24:]]),
        (wide[:, :24], wide[:, 24:]),
        weights,
        strict=True,
    ):
        _check(found, x, weight)


@pytest.mark.parametrize("layer", [MergedLinear, LinearBatch])
@pytest.mark.parametrize(
    ("weights", "backend", "message"),
    [
        ([], "torch", "weights must be at least one, are 0"),
        ([torch.zeros(2)], "torch", r"weights\[0\] must be"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).bfloat16()], "torch", r"weights\[1\] must be float32"),
        ([torch.zeros(2, 3)], "native", "backend must be one of reference, torch, triton"),
    ],
)
def test_wrong_layers_are_refused(layer: Any, weights: list[Tensor], backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(weights, backend=backend)


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights\[1\] must be float32 \[any, 3\], is float32 \[2, 4\]"):
        MergedLinear([torch.zeros(2, 3), torch.zeros(2, 4)], backend="torch")
    with pytest.raises(ValueError, match=r"x_MK must be float32 \[any, 3\]"):
        MergedLinear([torch.zeros(2, 3)], backend="torch")(torch.zeros(1, 4))
    batch = LinearBatch([torch.zeros(2, 3), torch.zeros(2, 4)], backend="torch")
    with pytest.raises(ValueError, match="inputs must be 2, one a weight, are 1"):
        batch([torch.zeros(1, 3)])
    with pytest.raises(ValueError, match=r"inputs\[1\] must be float32 \[any, 4\]"):
        batch([torch.zeros(1, 3), torch.zeros(1, 3)])
