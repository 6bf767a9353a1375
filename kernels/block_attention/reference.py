"""The plain truth: every position against every other of its sequence, and a mask."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernels.block_attention.window import Window


def block_attention_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: Window) -> Tensor:
    """Attend in fp32; see ``block_attention``."""
    out = torch.empty_like(q)
    for begin, end in pairwise(offsets.tolist()):
        seen = visible(end - begin, window)
        queries, keys, values = (x[begin:end].float() for x in (q, k, v))
        scores = window.scale * torch.einsum("qhd,khd->hqk", queries, keys)
        if window.activation == "softmax":
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        else:
            weights = functional.silu(scores).masked_fill(~seen, 0.0)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def visible(length: int, window: Window) -> Tensor:
    """Return which positions see which: bool [length, length], queries down, keys across."""
    position = torch.arange(length)
    age = position[:, None] // window.block - position[None] // window.block
    seen = (age >= 0) & (age < window.window_blocks)
    return seen & (position[:, None] >= position[None]) if window.causal else seen
