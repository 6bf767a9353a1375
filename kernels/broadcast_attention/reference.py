"""The plain truth: one request after another in float32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def broadcast_attention(
    q_CQHK: Tensor, k_THK: Tensor, v_THK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, scale: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""
    out = torch.zeros(q_CQHK.shape, dtype=torch.float32, device=q_CQHK.device)
    for request in range(len(ends) - 1):
        begin, end = int(ends[request]), int(ends[request + 1])
        mine = slice(None) if index_C is None else torch.nonzero(index_C == request)[:, 0]
        keys, values = k_THK[begin:end].float(), v_THK[begin:end].float()
        scores = torch.einsum("cqhk,thk->cqht", q_CQHK[mine].float(), keys)
        # Over no key at all the sum below is empty and the answer zero.
        weights = torch.softmax(scores * scale, -1) if activation == "softmax" else functional.silu(scores) * scale
        out[mine] = torch.einsum("cqht,thk->cqhk", weights, values)
    return out.to(q_CQHK.dtype)
