"""RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-6


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last axis and scales by a learned gain.

    The statistics are those of one row of one token group, so request-only rows never see a candidate.

    Args:
        width: Size of the last axis.
        num_counted: What the sum of squares is divided by; None: ``width``. More than ``width`` where entries were
            removed that count as zeros: with S their sum of squares, ``x / sqrt(S / counted + epsilon)`` equals
            ``x / sqrt(S / width + epsilon * counted / width)`` times ``sqrt(counted / width)``; the gain carries that
            last factor, so that the products cost no extra step.
        bias: Whether there is an offset.
    """

    def __init__(self, width: int, num_counted: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.epsilon = EPSILON * (num_counted or width) / width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [.., width] -> [.., width]."""
        out = functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return out if self.bias is None else out + self.bias
