"""Generalised dot-product attention: act(q k^T / tau) v, nothing normalised. See README.md.

Shape letters: B requests, C rows (candidates, or events), Q queries a row, H heads, K head width, M keys in all.
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
from kernels.gdpa import cpu, reference
from kernels.request_keys import HEAD_WIDTH_MAX, check_request_keys, require_triton_heads

__all__ = ["HEAD_WIDTH_MAX", "GdpaActivation", "gdpa"]

GdpaActivation: TypeAlias = Literal["relu", "gelu", "silu", "identity"]


def gdpa(
    q_CQHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    key_offsets: Tensor | None = None,
    row_to_request_C: Tensor | None = None,
    *,
    activation: GdpaActivation,
    tau: float = 1.0,
    backend: Backend,
) -> Tensor:
    """Attend without normalisation from every row's queries to all keys of its request.

    The arguments are those of ``broadcast_attention``: rows are any that belong to a request. With keys and values made
    of a request's features it is a feed-forward network of M hidden units whose weights are that request's.

    Args:
        q_CQHK: Queries.
        k_MHK: Keys, dtype of q: jagged [M, H, K] with offsets, or dense [B, M, H, K] without.
        v_MHK: Values, like the keys.
        key_offsets: int32 or int64 [B + 1] from 0 to M, non-decreasing; None for dense keys.
        row_to_request_C: int32 or int64 in ``[0, B)``, any order; None for one request.
        activation: ``relu``, ``gelu`` (by tanh), ``silu`` or ``identity``.
        tau: Divides the scores, inside the activation; in [1e-30, 1e30].
        backend: ``reference``, ``torch``, ``native`` (CPU, bf16, silu) or ``triton`` (K at most 128).

    Returns:
        [C, Q, H, K], dtype of q.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Source: GDPA of Kunlun, arXiv 2602.10016, with tau inside the activation as in its formula.
    """
    check_choice("backend", backend, ("reference", "torch", "native", "triton"))
    check_choice("activation", activation, ("relu", "gelu", "silu", "identity"))
    check_number("tau", tau, SCALE_LEAST, SCALE_MOST)
    ends = check_request_keys(
        q_CQHK, k_MHK, v_MHK, key_offsets, row_to_request_C, keys_letter="M", index_name="row_to_request_C"
    )
    if backend == "native":
        return _native(q_CQHK, k_MHK, v_MHK, key_offsets, row_to_request_C, activation, tau)
    keys, values = (x.reshape(-1, *q_CQHK.shape[2:]) for x in (k_MHK, v_MHK))
    if backend == "reference":
        return reference.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)
    if backend == "torch":
        return cpu.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)
    require_triton_heads(q_CQHK)
    from kernels.gdpa import triton_kernel

    return triton_kernel.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)


def _native(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, index: Tensor | None, activation: str, tau: float
) -> Tensor:
    native = native_library(q)
    check_tensor("q_CQHK of backend 'native'", q, (None, None, None, None), (torch.bfloat16,))
    if activation != "silu":
        raise ValueError(f"activation of backend 'native' must be 'silu', is {activation!r}")
    out: Tensor = native.broadcast_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        None if index is None else index.int().contiguous(),
        offsets=None if offsets is None else offsets.long().contiguous(),
        scale=1.0 / tau,
        activation="silu",
    )
    return out
