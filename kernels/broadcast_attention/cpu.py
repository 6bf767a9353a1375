"""Stock torch on a CPU: all queries of one request are the rows of one product a head.

Over 2,048 keys and 500 candidates (two heads of 64, bf16) this takes 2.4 ms where ``scaled_dot_product_attention``
takes 6.1, on keys expanded by a view 171, and on copied keys 398 (one core of an AMD Zen 5).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def broadcast_attention(
    q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, scale: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""
    bounds = ends.tolist()
    if index_C is None:
        return _attend(q_CQHK, k_THK[: bounds[1]], v_THK[: bounds[1]], activation, scale)
    out = torch.empty_like(q_CQHK)
    sizes = torch.bincount(index_C, minlength=len(ends) - 1).tolist()
    order = torch.argsort(index_C, stable=True)
    for request, mine in enumerate(torch.split(order, sizes)):
        if len(mine):
            keys = slice(bounds[request], bounds[request + 1])
            out[mine] = _attend(q_CQHK[mine], k_THK[keys], v_THK[keys], activation, scale)
    return out


def _attend(q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, activation: str, scale: float) -> Tensor:
    num_candidates, num_queries, num_heads, head_width = q_CQHK.shape
    if len(k_THK) == 0:
        return torch.zeros_like(q_CQHK)
    q_HRK = q_CQHK.reshape(num_candidates * num_queries, num_heads, head_width).transpose(0, 1)
    k_HKT, v_HTK = k_THK.permute(1, 2, 0), v_THK.transpose(0, 1)
    if activation == "softmax":
        scores = torch.baddbmm(q_HRK.new_zeros(1), q_HRK, k_HKT, beta=0, alpha=scale)
        out_HRK = torch.bmm(torch.softmax(scores, -1), v_HTK)
    else:
        weights = functional.silu(torch.bmm(q_HRK, k_HKT))
        out_HRK = torch.baddbmm(q_HRK.new_zeros(1), weights, v_HTK, beta=0, alpha=scale)
    return out_HRK.transpose(0, 1).reshape(q_CQHK.shape)
