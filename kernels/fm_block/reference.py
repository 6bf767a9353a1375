"""The plain truth, float32 throughout, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def fm_block(
    x_CnD: Tensor, y_nk: Tensor, part_BkD: Tensor | None, index_C: Tensor | None, gain: Tensor | None, epsilon: float
) -> Tensor:
    """Return X (X^T Y + part^T), normalised if there is a gain, [C, n, k]; see the facade."""
    x = x_CnD.float()
    s_CkD = torch.matmul(y_nk.float().T, x)
    if part_BkD is not None:
        s_CkD = s_CkD + (part_BkD if index_C is None else part_BkD.index_select(0, index_C))
    z_Cnk = torch.bmm(x, s_CkD.transpose(1, 2))
    if gain is not None:
        mean_square = z_Cnk.square().mean((1, 2), keepdim=True)
        z_Cnk = z_Cnk * torch.rsqrt(mean_square + epsilon) * gain.float().view(y_nk.shape)
    return z_Cnk.to(x_CnD.dtype)
