"""Stock torch on a CPU: all rows of one request are the rows of two products a head."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gdpa.reference import activate


def gdpa(
    q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, tau: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""
    bounds = ends.tolist()
    if index_C is None:
        return _attend(q_CQHK, k_MHK[: bounds[1]], v_MHK[: bounds[1]], activation, tau)
    out = torch.empty_like(q_CQHK)
    sizes = torch.bincount(index_C, minlength=len(ends) - 1).tolist()
    order = torch.argsort(index_C, stable=True)
    for request, mine in enumerate(torch.split(order, sizes)):
        if len(mine):
            keys = slice(bounds[request], bounds[request + 1])
            out[mine] = _attend(q_CQHK[mine], k_MHK[keys], v_MHK[keys], activation, tau)
    return out


def _attend(q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, activation: str, tau: float) -> Tensor:
    num_rows, num_queries, num_heads, head_width = q_CQHK.shape
    if len(k_MHK) == 0:
        return torch.zeros_like(q_CQHK)
    q_HRK = q_CQHK.reshape(num_rows * num_queries, num_heads, head_width).transpose(0, 1)
    scores = torch.baddbmm(q_HRK.new_zeros(1), q_HRK, k_MHK.permute(1, 2, 0), beta=0, alpha=1.0 / tau)
    out_HRK = torch.bmm(activate(scores, activation), v_MHK.transpose(0, 1))
    return out_HRK.transpose(0, 1).reshape(q_CQHK.shape)
