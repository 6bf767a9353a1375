"""The plain truth: one product a group in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_gemm(x_TK: Tensor, weight_GNK: Tensor, offsets: Tensor) -> Tensor:
    """Return each group's rows times its weight transposed, [T, N]; see the facade."""
    out = torch.zeros(len(x_TK), weight_GNK.shape[1], dtype=torch.float32, device=x_TK.device)
    for group in range(len(weight_GNK)):
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        out[rows] = x_TK[rows].float() @ weight_GNK[group].float().T
    return out.to(x_TK.dtype)
