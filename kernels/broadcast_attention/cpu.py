"""Stock torch on a CPU: all queries of one request are the rows of one product a head.

Over 2,048 keys and 500 candidates (two heads of 64, bf16) this takes 2.4 ms where ``scaled_dot_product_attention``
takes 6.1, on keys expanded by a view 171, and on copied keys 398 (one core of an AMD Zen 5).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.request_keys import attend_by_request


def broadcast_attention(
    q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, scale: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""

    def attend(q_HRK: Tensor, k_HKT: Tensor, v_HTK: Tensor) -> Tensor:
        if activation == "softmax":
            scores = torch.baddbmm(q_HRK.new_zeros(1), q_HRK, k_HKT, beta=0, alpha=scale)
            return torch.bmm(torch.softmax(scores, -1), v_HTK)
        weights = functional.silu(torch.bmm(q_HRK, k_HKT))
        return torch.baddbmm(q_HRK.new_zeros(1), weights, v_HTK, beta=0, alpha=scale)

    return attend_by_request(q_CQHK, k_THK, v_THK, ends, index_C, attend)
