"""Attention of positions to the last blocks of their own sequence, jagged, causal or not. See README.md."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.block_attention.cpu import block_attention_torch
from kernels.block_attention.reference import block_attention_reference
from kernels.block_attention.window import Activation, Window

__all__ = ["Activation", "Backend", "Window", "block_attention"]

Backend: TypeAlias = Literal["reference", "torch", "native"]

_BACKENDS = ("reference", "torch", "native")
_DTYPES = {
    "reference": (torch.float32, torch.bfloat16),
    "torch": (torch.float32, torch.bfloat16),
    "native": (torch.bfloat16,),
}


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block: int,
    window_blocks: int,
    causal: bool = True,
    activation: Activation = "softmax",
    scale: float | None = None,
    backend: Backend,
) -> Tensor:
    """Let positions attend to their own block and the window_blocks - 1 whole blocks before it.

    A position's answer depends on what it sees alone; so appending to a sequence changes no earlier answer when
    ``causal``, and none of an earlier block when not.

    Args:
        q: fp32 or bf16 [T, H, K], jagged.
        k: The same.
        v: The same.
        offsets: int64 [B + 1]; a sequence may be empty.
        block: See ``Window``, as the next three.
        window_blocks: Blocks that a position sees.
        causal: Whether it sees its own block only up to itself.
        activation: ``softmax`` or ``silu``.
        scale: Factor of the scores; None: K ** -0.5.
        backend: ``reference``: full attention and a mask, in fp32; ``torch``: a product a block; ``native``: fused C++,
            bf16 only.

    Returns:
        [T, H, K] of q's dtype.

    Raises:
        ValueError: an argument breaks these rules, or the backend does not exist or has no such dtype.
        kernels.native.NativeUnavailableError: ``native`` was asked for and cannot be used here.

    Source: the sliding windows of Kunlun (arXiv 2602.10016) and ULTRA-HSTU (arXiv 2602.16986) in whole blocks; ``silu``
    is the activation of HSTU (arXiv 2402.17152).
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {sorted(_BACKENDS)}, is {backend!r}")
    if q.dim() != 3 or q.dtype not in _DTYPES[backend]:
        raise ValueError(f"q must be [T, H, K] of one of {_DTYPES[backend]}, is {q.dtype} {list(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {list(q.shape)}, is {x.dtype} {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, is on {x.device}")
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) < 1:
        raise ValueError(f"offsets must be torch.int64 [B + 1], is {offsets.dtype} {list(offsets.shape)}")
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != len(q) or any(begin > end for begin, end in pairwise(bounds)):
        raise ValueError(f"offsets must ascend from 0 to {len(q)}")
    window = Window(block, window_blocks, causal, activation, q.shape[2] ** -0.5 if scale is None else scale)
    with torch.no_grad():
        if backend == "reference":
            return block_attention_reference(q, k, v, offsets, window)
        if backend == "torch":
            return block_attention_torch(q, k, v, offsets, window)
        # Imported here, so that the other backends do not depend on the binding.
        from kernels import native

        return native.block_attention(*(x.contiguous() for x in (q, k, v, offsets)), **asdict(window))
