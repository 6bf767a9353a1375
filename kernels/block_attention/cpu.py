"""The portable form: each block against its window, as batched products of PyTorch's own."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernels.block_attention.window import Window


def block_attention_torch(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: Window) -> Tensor:
    """Attend in the inputs' dtype; see ``block_attention``."""
    out = torch.empty_like(q)
    for begin, end in pairwise(offsets.tolist()):
        length = end - begin
        if length == 0:
            continue
        own_block = min(window.block, length)
        num_blocks = -(-length // own_block)
        seen_blocks = min(window.window_blocks, num_blocks)
        queries = _blocks(q[begin:end] * window.scale, own_block, 0, 1)
        keys = _blocks(k[begin:end], own_block, seen_blocks - 1, seen_blocks)
        values = _blocks(v[begin:end], own_block, seen_blocks - 1, seen_blocks)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_blocks, -1, own_block, seen_blocks * own_block)
        seen = _visible(length, own_block, seen_blocks, window.causal)[:, None]
        if window.activation == "softmax":
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        else:
            weights = functional.silu(scores).masked_fill(~seen, 0.0)
        answers = torch.bmm(weights.flatten(0, 1), values).view(num_blocks, q.shape[1], own_block, q.shape[2])
        out[begin:end] = answers.transpose(1, 2).flatten(0, 1)[:length]
    return out


def _blocks(x: Tensor, block: int, blocks_before: int, window: int) -> Tensor:
    """Cut [length, H, K] into windows [num_blocks * H, window * block, K], zero before its begin and behind its end."""
    length, num_heads, width = x.shape
    num_blocks = -(-length // block)
    padded = functional.pad(x, (0, 0, 0, 0, blocks_before * block, num_blocks * block - length))
    # [num_blocks, H, K, window * block]
    windows = padded.unfold(0, window * block, block)
    return windows.permute(0, 1, 3, 2).reshape(num_blocks * num_heads, window * block, width)


def _visible(length: int, block: int, window: int, causal: bool) -> Tensor:
    """Return which keys of its window each query of a block sees: bool [num_blocks, block, window * block]."""
    num_blocks = -(-length // block)
    begin = torch.arange(num_blocks)[:, None, None] * block
    query = begin + torch.arange(block)[None, :, None]
    key = begin + torch.arange((1 - window) * block, block)[None, None]
    seen = (key >= 0) & (key < length)
    # A query behind the end is cut off later; it sees what the last real one sees, so that no row is empty.
    return seen & (key <= query.clamp(max=length - 1)) if causal else seen.expand(-1, block, -1)
