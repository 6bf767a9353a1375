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


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, block: int, window_blocks: int, num_before: int = 0) -> Tensor:
    """Let events attend to their own block up to themselves, and to the whole blocks before it.

    Args:
        q: [B, n, H, K], events; the first is the first of a block unless ``num_before`` says otherwise.
        k: [B, num_before + n, H, K]; the first num_before rows are those of earlier events, the first of them the first
            of a block.
        v: The same.
        block: Events of a block.
        window_blocks: Blocks that an event sees, its own among them.
        num_before: Earlier events in k and v: those of the open block, and of as many whole ones before it as an event
            sees or as there are.

    Returns:
        [B, n, H, K]. Every block is one product of one shape, so an event's answer has the same bits whatever else is
        computed beside it.
    """
    batch, length, num_heads, width = q.shape
    if length == 0:
        return q
    num_blocks = -(-length // block)
    if batch > 1 and not num_before and num_blocks <= window_blocks:
        # A batch of short histories, as in training: everything earlier is seen.
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
    num_open = num_before % block
    num_blocks = -(-(num_open + length) // block)
    behind = num_blocks * block - num_open - length
    missing = (window_blocks - 1) * block - (num_before - num_open)
    queries = functional.pad(q, (0, 0, 0, 0, num_open, behind)).view(batch * num_blocks, block, num_heads, width)

    def windows(x: Tensor) -> Tensor:
        whole = functional.pad(x, (0, 0, 0, 0, missing, behind)).view(batch, -1, block, num_heads, width)
        shifted = [whole[:, shift : shift + num_blocks] for shift in range(window_blocks)]
        return torch.cat(shifted, dim=2).flatten(0, 1).transpose(1, 2)

    seen = torch.ones(block, window_blocks * block, dtype=torch.bool).tril((window_blocks - 1) * block)
    place = torch.arange(window_blocks * block) + torch.arange(num_blocks)[:, None] * block
    masks = (seen & (place >= missing)[:, None])[:, None].repeat(batch, 1, 1, 1)
    out = functional.scaled_dot_product_attention(queries.transpose(1, 2), windows(k), windows(v), attn_mask=masks)
    return out.transpose(1, 2).reshape(batch, num_blocks * block, num_heads, width)[:, num_open : num_open + length]
