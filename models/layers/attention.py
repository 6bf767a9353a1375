"""Attention of query tokens to an encoded history whose keys and values are computed once a request."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.layers.layout import CandidateLayout


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, num_heads: int) -> Tensor:
    """Multi-head scaled dot-product attention.

    Args:
        queries: [B, Q, D].
        keys: [B, T, D].
        values: [B, T, D].
        mask: bool [B, T], true where a key may be seen, at least one a row; None: all of them.
        num_heads: H, divides D.

    Returns:
        [B, Q, D], heads side by side.
    """
    q, k, v = (_split(x, num_heads) for x in (queries, keys, values))
    seen = None if mask is None else mask[:, None, None, :]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(queries.shape)


def attend_candidates(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, num_heads: int, layout: CandidateLayout
) -> Tensor:
    """Let candidates attend to the history of their own request, without a copy of it per candidate.

    Args:
        queries: Token-major [n, C, D].
        keys: [B, T, D].
        values: [B, T, D].
        mask: As in ``attend``.
        num_heads: H.
        layout: Which request each candidate belongs to.

    Returns:
        Token-major [n, C, D].
    """
    num_tokens, num_candidates, width = queries.shape
    if layout.slot is None:
        flat = queries.reshape(1, num_tokens * num_candidates, width)
        return attend(flat, keys, values, mask, num_heads).view(num_tokens, num_candidates, width)
    if layout.grid_request is not None:
        keys, values = keys.index_select(0, layout.grid_request), values.index_select(0, layout.grid_request)
        mask = None if mask is None else mask.index_select(0, layout.grid_request)
    num_rows = len(keys)
    grid = torch.zeros(num_rows * layout.num_slots, num_tokens * width, dtype=queries.dtype, device=queries.device)
    grid = grid.index_copy(0, layout.slot, queries.transpose(0, 1).reshape(num_candidates, num_tokens * width))
    seen = attend(grid.view(num_rows, layout.num_slots * num_tokens, width), keys, values, mask, num_heads)
    own = seen.view(num_rows * layout.num_slots, num_tokens * width).index_select(0, layout.slot)
    return own.view(num_candidates, num_tokens, width).transpose(0, 1)


def _split(x: Tensor, num_heads: int) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)
