"""The plain truth: one sequence after another in float32, one rounding at the end."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def jagged_norm(
    x_TD: Tensor, gain_D: Tensor, offsets: Tensor, residual_TD: Tensor | None, over: str, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return sum and norm; see the facade."""
    total = x_TD if residual_TD is None else (x_TD.float() + residual_TD.float()).to(x_TD.dtype)
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for begin, end in pairwise(offsets.tolist()):
        rows = total[begin:end].float()
        square = rows.square().mean(dim=-1 if over == "row" else (0, 1), keepdim=True)
        out[begin:end] = rows * torch.rsqrt(square + epsilon) * gain_D.float()
    return total, out.to(x_TD.dtype)
