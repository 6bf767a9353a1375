"""Jagged norms of every backend against float64: empty and one-row sequences, padding that holds NaN, residuals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.jagged_norm import WIDTH_MAX, jagged_norm
from kernels.tolerance import largest_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpret)]
# width, rows of each sequence, rows of padding
SHAPES = [(1, [1], 0), (16, [65, 0, 1, 300], 0), (19, [7, 2], 5), (64, [], 3), (33, [0, 0], 0), (520, [9], 1)]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("over", ["row", "sequence"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equals_the_formula(backend: Any, dtype: torch.dtype, shape: Any, over: Any, with_residual: bool) -> None:
    width, lengths, padding = shape
    num_rows = sum(lengths)
    x, residual = (_random(num_rows + padding, width, dtype=dtype, seed=seed) for seed in (0, 1))
    x[num_rows:], gain = float("nan"), _random(width, dtype=dtype, seed=2)
    given = residual if with_residual else None
    total, out = jagged_norm(x, gain, _offsets(lengths), residual_TD=given, over=over, backend=backend)
    summed = (x.float() + residual.float()).to(dtype) if with_residual else x
    torch.testing.assert_close(total, summed, rtol=0, atol=0, equal_nan=True)
    assert not out[num_rows:].any()
    for rows, own in zip(torch.split(summed[:num_rows], lengths), torch.split(out[:num_rows], lengths), strict=True):
        square = rows.double().square()
        mean = square.mean(1, keepdim=True) if over == "row" else square.mean()
        expected = rows.double() / torch.sqrt(mean + 1e-6) * gain.double()
        assert largest_error(own, expected, expected.abs()) <= tolerance(dtype, width * max(len(rows), 1), roundings=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_norm_does_not_see_other_rows(backend: Any) -> None:
    x, gain = _random(9, 16), _random(16, seed=1)
    whole = jagged_norm(x, gain, _offsets([4, 5]), backend=backend)[1]
    longer = jagged_norm(torch.cat([x[:4], x]), gain, _offsets([8, 5]), backend=backend)[1]
    torch.testing.assert_close(longer[4:], whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": _offsets([5])}, "offsets must rise from 0 to at most 4"),
        ({"gain_D": torch.ones(3)}, "gain_D must be"),
        ({"over": "batch"}, "over must be one of"),
        ({"residual_TD": torch.zeros(3, 2)}, "residual_TD must be"),
        ({"backend": "native"}, "backend must be one of"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    given = {"x_TD": torch.zeros(4, 2), "gain_D": torch.ones(2), "offsets": _offsets([4]), "backend": "torch"}
    with pytest.raises(ValueError, match=message):
        jagged_norm(**{**given, **changes})


@pytest.mark.interpret
def test_triton_refuses_wide_rows() -> None:
    x = torch.zeros(1, WIDTH_MAX + 1)
    with pytest.raises(ValueError, match="width of at most"):
        jagged_norm(x, x[0], _offsets([1]), backend="triton")
