"""Stock torch on a CPU: rows by the fused norm; sequences by one sum a sequence, without a loop over them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def jagged_norm(
    x_TD: Tensor, gain_D: Tensor, offsets: Tensor, residual_TD: Tensor | None, over: str, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return sum and norm; see the facade."""
    total = x_TD if residual_TD is None else x_TD + residual_TD
    num_rows = int(offsets[-1])
    used = total[:num_rows]
    if over == "row":
        normed = functional.rms_norm(used, gain_D.shape, gain_D, epsilon)
    else:
        lengths = offsets.diff().long()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        squares = used.float().square().sum(-1)
        sums = torch.zeros(len(lengths)).index_add(0, owner, squares)
        factor = torch.rsqrt(sums / (lengths.clamp(min=1) * x_TD.shape[1]) + epsilon)
        normed = (used.float() * factor[owner][:, None] * gain_D.float()).to(x_TD.dtype)
    return total, functional.pad(normed, (0, 0, 0, len(total) - num_rows))
