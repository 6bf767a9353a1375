"""Attention of positions to the last blocks of their own sequence, jagged, causal or not. See README.md."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.block_attention.cpu import block_attention_torch
from kernels.block_attention.reference import block_attention_reference

__all__ = ["Activation", "Backend", "block_attention"]

Activation: TypeAlias = Literal["softmax", "silu"]
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
        block: Positions of a block, at least 1; the last one of a sequence may be shorter.
        window_blocks: Blocks that a position sees, its own among them, at least 1.
        causal: Within its own block a position sees those up to itself; else the whole block.
        activation: ``softmax``, or ``silu``: the sum of silu(scale * q k) v, not normalised.
        scale: Factor of the scores, positive; None: K ** -0.5.
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
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) < 1:
        raise ValueError(f"offsets must be torch.int64 [B + 1], is {offsets.dtype} {list(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] != len(q) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must ascend from 0 to {len(q)}")
    if block < 1 or window_blocks < 1:
        raise ValueError(f"block and window_blocks must be at least 1, are {block} and {window_blocks}")
    if activation not in ("softmax", "silu"):
        raise ValueError(f"activation must be softmax or silu, is {activation!r}")
    factor = q.shape[2] ** -0.5 if scale is None else scale
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"scale must be positive and finite, is {factor}")
    with torch.no_grad():
        return _run(q, k, v, offsets, block, window_blocks, causal, activation, factor, backend)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block: int,
    window_blocks: int,
    causal: bool,
    activation: Activation,
    scale: float,
    backend: Backend,
) -> Tensor:
    if backend == "native":
        # Imported here, so that the other backends do not depend on the binding.
        from kernels import native

        return native.block_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            offsets.contiguous(),
            block=block,
            window_blocks=window_blocks,
            causal=causal,
            activation=activation,
            scale=scale,
        )
    run = block_attention_torch if backend == "torch" else block_attention_reference
    return run(
        q,
        k,
        v,
        offsets,
        block=block,
        window_blocks=window_blocks,
        causal=causal,
        activation=activation,
        scale=scale,
    )
