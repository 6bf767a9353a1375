"""The plain truth: one request after another in float32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def gdpa(
    q_CQHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, ends: Tensor, index_C: Tensor | None, activation: str, tau: float
) -> Tensor:
    """Return the attended values, [C, Q, H, K]; see the facade."""
    out = torch.zeros(q_CQHK.shape, dtype=torch.float32, device=q_CQHK.device)
    for request in range(len(ends) - 1):
        begin, end = int(ends[request]), int(ends[request + 1])
        mine = slice(None) if index_C is None else torch.nonzero(index_C == request)[:, 0]
        keys, values = k_MHK[begin:end].float(), v_MHK[begin:end].float()
        scores = torch.einsum("cqhk,mhk->cqhm", q_CQHK[mine].float(), keys) / tau
        out[mine] = torch.einsum("cqhm,mhk->cqhk", activate(scores, activation), values)
    return out.to(q_CQHK.dtype)


def activate(scores: Tensor, activation: str) -> Tensor:
    """Apply an activation by its name."""
    if activation == "relu":
        return functional.relu(scores)
    if activation == "gelu":
        return functional.gelu(scores, approximate="tanh")
    return functional.silu(scores) if activation == "silu" else scores
