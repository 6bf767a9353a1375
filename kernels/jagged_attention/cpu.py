"""Stock torch on a CPU: one fused attention a sequence, or one for all where every sequence has the same length."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def jagged_attention(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, query_ends: Tensor, key_ends: Tensor, causal: bool, scale: float
) -> Tensor:
    """Return the attended values, [T, H, K]; see the facade."""
    num_queries, num_keys = query_ends.diff().tolist(), key_ends.diff().tolist()
    if num_queries and len(set(num_queries)) == len(set(num_keys)) == 1:
        return _attend(q_THK, k_SHK, v_SHK, len(num_queries), causal, scale)
    out = torch.empty_like(q_THK)
    bounds = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (first, last), (begin, end) in bounds:
        if last > first:
            out[first:last] = _attend(q_THK[first:last], k_SHK[begin:end], v_SHK[begin:end], 1, causal, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, num_sequences: int, causal: bool, scale: float) -> Tensor:
    """Attend in sequences of one length each: q [B * n, H, K], k and v [B * s, H, K] -> [B * n, H, K]."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q)
    queries, keys, values = (x.contiguous().view(num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    if not causal:
        out = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
    else:
        stands = torch.arange(num_keys - num_queries, num_keys)
        seen = torch.arange(num_keys) <= stands[:, None]
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        if num_keys < num_queries:
            out[:, :, : num_queries - num_keys] = 0.0
    return out.transpose(1, 2).reshape(q.shape)
