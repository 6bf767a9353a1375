"""Broadcast attention: candidates' queries on the keys and values of their own request, never copied. See README.md.

Shape letters: B requests, C candidates, Q queries a candidate, H heads, K head width, T keys of all requests.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.backends import (
    SCALE_LEAST,
    SCALE_MOST,
    Backend,
    check_choice,
    check_number,
    check_tensor,
    native_library,
)
from kernels.broadcast_attention import cpu, reference
from kernels.request_keys import HEAD_WIDTH_MAX, check_request_keys, require_triton_heads

__all__ = ["HEAD_WIDTH_MAX", "AttentionActivation", "broadcast_attention"]

AttentionActivation: TypeAlias = Literal["softmax", "silu"]


def broadcast_attention(
    q_CQHK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    key_offsets: Tensor | None = None,
    candidate_to_request_C: Tensor | None = None,
    *,
    activation: AttentionActivation = "softmax",
    scale: float | None = None,
    backend: Backend,
) -> Tensor:
    """Attend from every candidate's queries to all keys of its request.

    ``softmax``: softmax(scale * q k^T) v. ``silu``: scale * silu(q k^T) v, without normalisation, the scale outside the
    activation. A request without keys answers with zeros.

    Args:
        q_CQHK: Queries.
        k_THK: Keys, dtype of q: jagged [T, H, K] with offsets, or dense [B, T, H, K] without.
        v_THK: Values, like the keys.
        key_offsets: int32 or int64 [B + 1] from 0 to T, non-decreasing; None for dense keys.
        candidate_to_request_C: int32 or int64 in ``[0, B)``, any order; None for one request.
        activation: ``softmax`` or ``silu``.
        scale: In [1e-30, 1e30]. None: K ** -0.5 for softmax; silu has no default, it is usually one over the longest
            history.
        backend: ``reference``, ``torch``, ``native`` (CPU, bf16) or ``triton`` (K at most 128).

    Returns:
        [C, Q, H, K], dtype of q.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Source: broadcast attention of In-Kernel Broadcast (PyTorch blog); silu is GDPA, Kunlun, arXiv 2602.10016, with the
        scale where its published kernels have it.
    """
    check_choice("backend", backend, ("reference", "torch", "native", "triton"))
    check_choice("activation", activation, ("softmax", "silu"))
    ends = check_request_keys(
        q_CQHK, k_THK, v_THK, key_offsets, candidate_to_request_C, keys_letter="T", index_name="candidate_to_request_C"
    )
    if scale is None:
        if activation == "silu":
            raise ValueError("scale must be given for activation 'silu'")
        scale = q_CQHK.shape[-1] ** -0.5
    check_number("scale", scale, SCALE_LEAST, SCALE_MOST)
    if backend == "native":
        return _native(q_CQHK, k_THK, v_THK, key_offsets, candidate_to_request_C, activation, scale)
    keys, values = (x.reshape(-1, *q_CQHK.shape[2:]) for x in (k_THK, v_THK))
    if backend == "reference":
        return reference.broadcast_attention(q_CQHK, keys, values, ends, candidate_to_request_C, activation, scale)
    if backend == "torch":
        return cpu.broadcast_attention(q_CQHK, keys, values, ends, candidate_to_request_C, activation, scale)
    require_triton_heads(q_CQHK)
    from kernels.broadcast_attention import triton_kernel

    return triton_kernel.broadcast_attention(q_CQHK, keys, values, ends, candidate_to_request_C, activation, scale)


def _native(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, index: Tensor | None, activation: str, scale: float
) -> Tensor:
    native = native_library(q)
    check_tensor("q_CQHK of backend 'native'", q, (None, None, None, None), (torch.bfloat16,))
    is_softmax = activation == "softmax"
    out: Tensor = native.broadcast_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        None if index is None else index.int().contiguous(),
        offsets=None if offsets is None else offsets.long().contiguous(),
        # There the scale is inside the activation.
        scale=scale if is_softmax else 1.0,
        activation=activation,
        out_dtype=torch.bfloat16 if is_softmax else torch.float32,
    )
    return out if is_softmax else out.mul_(scale).to(q.dtype)
