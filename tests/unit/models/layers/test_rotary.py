"""Turned rows: products depend on differences alone, far along a history too, and lengths stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.tolerance import tolerance
from models.layers.rotary import rotate, turns

HEADS, WIDTH = 2, 8


def _turned(x: Tensor, position: float, time: float) -> Tensor:
    place = torch.tensor([position], dtype=torch.float64), torch.tensor([time], dtype=torch.float64)
    return rotate(x, turns(*place, WIDTH, HEADS))


@pytest.mark.parametrize("far", [0.0, 10.0, 50_000.0])
def test_a_product_depends_on_how_far_two_rows_are_apart(far: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, HEADS * WIDTH), torch.randn(1, HEADS * WIDTH)
    near = _turned(q, 7.0, 3.5) @ _turned(k, 2.0, 1.25).T
    moved = _turned(q, 7.0 + far, 3.5 + far) @ _turned(k, 2.0 + far, 1.25 + far).T
    limit = tolerance(torch.float32, HEADS * WIDTH) * float(q.norm() * k.norm())
    assert float((near - moved).abs()) <= limit
    assert float((near - _turned(q, 8.0, 3.5) @ _turned(k, 2.0, 1.25).T).abs()) > 10 * limit
    assert float((near - _turned(q, 7.0, 4.5) @ _turned(k, 2.0, 1.25).T).abs()) > 10 * limit


def test_lengths_stay_and_nothing_turns_at_the_beginning() -> None:
    torch.manual_seed(1)
    x = torch.randn(1, HEADS * WIDTH)
    torch.testing.assert_close(_turned(x, 123.0, 4.5).norm(), x.norm())
    torch.testing.assert_close(_turned(x, 0.0, 0.0), x, rtol=0, atol=0)


def test_all_heads_turn_alike() -> None:
    x = torch.randn(1, WIDTH).repeat(1, HEADS)
    first, second = _turned(x, 5.0, 2.0).chunk(HEADS, dim=-1)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
