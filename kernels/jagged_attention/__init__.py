"""Attention of jagged queries to the jagged keys of their own sequence, causal or not. See README.md.

Shape letters: B sequences, T queries of all sequences, S keys of all sequences, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import (
    SCALE_LEAST,
    SCALE_MOST,
    Backend,
    check_choice,
    check_number,
    check_offsets,
    check_tensor,
    native_library,
)
from kernels.jagged_attention import cpu, reference
from kernels.request_keys import HEAD_WIDTH_MAX, require_triton_heads

__all__ = ["HEAD_WIDTH_MAX", "jagged_attention"]


def jagged_attention(
    q_THK: Tensor,
    k_SHK: Tensor,
    v_SHK: Tensor,
    query_offsets: Tensor | None,
    key_offsets: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: Backend,
) -> Tensor:
    """Attend within sequences: softmax(scale * q k^T) v, queries of sequence b to keys of sequence b.

    The last query of a sequence stands at its last key. So with ``causal`` a sequence may have fewer queries than keys:
    those of events that were appended to keys that are kept.

    Args:
        q_THK: Queries, jagged by ``query_offsets``.
        k_SHK: Keys, jagged by ``key_offsets``, dtype of q.
        v_SHK: Values, like the keys.
        query_offsets: int32 or int64 [B + 1] from 0 to T, non-decreasing; None: all T queries attend to every
            sequence, and the answer is [B * T, H, K], sequence by sequence.
        key_offsets: int32 or int64 [B + 1] from 0 to S, non-decreasing.
        causal: Query i of n sees keys up to i + (number of keys - n).
        scale: In [1e-30, 1e30]; None: K ** -0.5.
        backend: ``reference``, ``torch``, ``native`` (CPU, bf16; causal with as many keys as queries only) or
            ``triton`` (K at most 128).

    Returns:
        [T, H, K] (or [B * T, H, K]), dtype of q; 0 where a query sees no key.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Source: Jagged Flash Attention, arXiv 2409.15373; queries shared by all sequences: the pooling attention of Kunlun,
        arXiv 2602.10016.
    """
    check_choice("backend", backend, ("reference", "torch", "native", "triton"))
    check_tensor("q_THK", q_THK, (None, None, None))
    num_queries, num_heads, head_width = q_THK.shape
    check_tensor("k_SHK", k_SHK, (None, num_heads, head_width), (q_THK.dtype,), q_THK.device)
    check_tensor("v_SHK", v_SHK, k_SHK.shape, (q_THK.dtype,), q_THK.device)
    check_offsets("key_offsets", key_offsets, len(k_SHK))
    if query_offsets is not None:
        check_offsets("query_offsets", query_offsets, num_queries)
        if len(query_offsets) != len(key_offsets):
            raise ValueError(
                f"query_offsets must be as many as key_offsets, {len(key_offsets)}, are {len(query_offsets)}"
            )
    elif causal:
        raise ValueError("causal needs query_offsets, which are None")
    factor = head_width**-0.5 if scale is None else scale
    check_number("scale", factor, SCALE_LEAST, SCALE_MOST)
    if backend == "native":
        return _native(q_THK, k_SHK, v_SHK, query_offsets, key_offsets, causal, factor)
    if query_offsets is None:
        num_sequences = len(key_offsets) - 1
        q_THK = q_THK.repeat(num_sequences, 1, 1)
        query_offsets = torch.arange(num_sequences + 1, device=q_THK.device) * num_queries
    if backend == "reference":
        return reference.jagged_attention(q_THK, k_SHK, v_SHK, query_offsets, key_offsets, causal, factor)
    if backend == "torch":
        return cpu.jagged_attention(q_THK, k_SHK, v_SHK, query_offsets, key_offsets, causal, factor)
    require_triton_heads(q_THK)
    from kernels.jagged_attention import triton_kernel

    return triton_kernel.jagged_attention(q_THK, k_SHK, v_SHK, query_offsets, key_offsets, causal, factor)


def _native(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor | None, key_offsets: Tensor, causal: bool, scale: float
) -> Tensor:
    native = native_library(q)
    check_tensor("q_THK of backend 'native'", q, (None, None, None), (torch.bfloat16,))
    num_sequences, keys = len(key_offsets) - 1, key_offsets.long().contiguous()
    parts = [x.contiguous() for x in (q, k, v)]
    if causal:
        if query_offsets is None or not torch.equal(query_offsets.long(), keys):
            raise ValueError("backend 'native' is causal only with as many keys as queries in every sequence")
        longest = max(int(keys.diff().max()) if num_sequences else 0, 1)
        answers: Tensor = native.block_attention(*parts, keys, block=longest, window_blocks=1, scale=scale)
        return answers
    if query_offsets is None:
        query_offsets = torch.arange(num_sequences + 1) * len(q)
        parts[0] = parts[0].repeat(num_sequences, 1, 1)
    owner = torch.repeat_interleave(torch.arange(num_sequences, dtype=torch.int32), query_offsets.long().diff())
    out: Tensor = native.broadcast_attention(
        parts[0][:, None].contiguous(), parts[1], parts[2], owner, offsets=keys, scale=scale
    )
    return out[:, 0]
