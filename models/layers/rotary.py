"""Rotary encoding: turns pairs of channels by angles, so that a product of two rows depends on where both stand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

POSITION_BASE = 10_000.0
TIME_SLOWEST, TIME_FASTEST = 0.125, 2.0
"""Radians a unit of log time: the slowest pair turns by less than half a circle over all gaps that are told apart, the
fastest by a quarter where a gap doubles."""


def turns(positions: Tensor, times: Tensor, head_width: int, num_heads: int) -> Tensor:
    """Return by how much each pair of channels is turned, as complex numbers of size 1.

    The first half of a head's pairs turns with the position, the others with the log time. Angles are float64 until
    they are within a circle: far along a history float32 has no digits left for them.

    Args:
        positions: float64 [..], events.
        times: float64 [..], log time.
        head_width: K, even.
        num_heads: H; all heads turn alike.

    Returns:
        complex64 [.., H * K / 2].
    """
    by_position, by_time = frequencies(head_width)
    angles = torch.cat([positions[..., None] * by_position, times[..., None] * by_time], dim=-1)
    circle = torch.remainder(angles, 2 * math.pi).float()
    return torch.polar(torch.ones_like(circle), circle).repeat(*[1] * positions.dim(), num_heads)


def frequencies(head_width: int) -> tuple[Tensor, Tensor]:
    """Return by how many radians each pair of a head's channels turns an event, or a unit of log time: both float64.

    Args:
        head_width: K, even; K / 2 pairs in all.
    """
    pairs = head_width // 2
    num_time = pairs // 2
    num_position = pairs - num_time
    by_position = POSITION_BASE ** -(torch.arange(num_position, dtype=torch.float64) / num_position)
    step = (TIME_SLOWEST / TIME_FASTEST) ** (1 / max(num_time - 1, 1))
    return by_position, TIME_FASTEST * step ** torch.arange(num_time, dtype=torch.float64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn neighbouring channels of each row: x [.., D] by complex64 [.., D / 2] -> [.., D]; computed in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
