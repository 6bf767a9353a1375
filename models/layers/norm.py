"""RMS normalisation without a bias."""

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
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [.., width] -> [.., width]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON)
