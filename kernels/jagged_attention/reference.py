"""The plain truth: one sequence after another in float32, one rounding at the end."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def jagged_attention(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, query_ends: Tensor, key_ends: Tensor, causal: bool, scale: float
) -> Tensor:
    """Return the attended values, [T, H, K]; see the facade."""
    out = torch.zeros(q_THK.shape, dtype=torch.float32, device=q_THK.device)
    bounds = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (first, last), (begin, end) in bounds:
        queries, keys, values = q_THK[first:last].float(), k_SHK[begin:end].float(), v_SHK[begin:end].float()
        scores = torch.einsum("qhk,shk->hqs", queries, keys) * scale
        sees_none = torch.zeros(last - first, dtype=torch.bool, device=q_THK.device)
        if causal:
            stands = torch.arange(last - first, device=q_THK.device) + (end - begin) - (last - first)
            scores.masked_fill_(torch.arange(end - begin, device=q_THK.device) > stands[:, None], -torch.inf)
            sees_none = stands < 0
        # Over no key at all the softmax is 0 / 0 and the answer zero; a NaN that was given stays one.
        weights = torch.softmax(scores, -1).masked_fill(sees_none[:, None], 0.0)
        out[first:last] = torch.einsum("hqs,shk->qhk", weights, values)
    return out.to(q_THK.dtype)
