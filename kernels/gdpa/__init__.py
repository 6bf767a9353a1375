"""Generalised dot-product attention: act(q k^T / tau) v, nothing normalised. See README.md.

Shape letters: B requests, C rows (candidates, or events), Q queries a row, H heads, K head width, M keys in all.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.backends import Backend, check_choice, check_index, check_tensor, native_library, require_triton
from kernels.gdpa import cpu, reference

__all__ = ["HEAD_WIDTH_MAX", "GdpaActivation", "gdpa"]

GdpaActivation: TypeAlias = Literal["relu", "gelu", "silu", "identity"]

HEAD_WIDTH_MAX = 128
"""K of the Triton kernel: a tile of queries and its accumulator stay in registers."""


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
        tau: Divides the scores, inside the activation; positive.
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
    check_tensor("q_CQHK", q_CQHK, (None, None, None, None))
    num_rows, _, num_heads, head_width = q_CQHK.shape
    if not 0.0 < tau < float("inf"):
        raise ValueError(f"tau must be positive and finite, is {tau}")
    if key_offsets is None:
        check_tensor("k_MHK without key_offsets", k_MHK, (None, None, num_heads, head_width), (q_CQHK.dtype,))
        num_requests, num_keys = k_MHK.shape[:2]
        ends = torch.arange(num_requests + 1, dtype=torch.int32, device=q_CQHK.device) * num_keys
    else:
        check_tensor("k_MHK with key_offsets", k_MHK, (None, num_heads, head_width), (q_CQHK.dtype,))
        check_tensor("key_offsets", key_offsets, (None,), (torch.int32, torch.int64))
        num_requests, ends = len(key_offsets) - 1, key_offsets
        _check_offsets(key_offsets, len(k_MHK))
    check_tensor("v_MHK", v_MHK, k_MHK.shape, (q_CQHK.dtype,))
    check_index("row_to_request_C", row_to_request_C, num_rows, num_requests, q_CQHK.device)
    if backend == "native":
        return _native(q_CQHK, k_MHK, v_MHK, key_offsets, row_to_request_C, activation, tau)
    keys, values = k_MHK.reshape(-1, num_heads, head_width), v_MHK.reshape(-1, num_heads, head_width)
    if backend == "reference":
        return reference.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)
    if backend == "torch":
        return cpu.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)
    require_triton(q_CQHK)
    if head_width > HEAD_WIDTH_MAX:
        raise ValueError(f"backend 'triton' takes a head width of at most {HEAD_WIDTH_MAX}, got {head_width}")
    from kernels.gdpa import triton_kernel

    return triton_kernel.gdpa(q_CQHK, keys, values, ends, row_to_request_C, activation, tau)


def _check_offsets(offsets: Tensor, num_keys: int) -> None:
    if len(offsets) == 0:
        raise ValueError("key_offsets must be [B + 1], is empty")
    # On a GPU the check would wait for the device.
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_keys or bool((offsets.diff() < 0).any()):
        raise ValueError(f"key_offsets must rise from 0 to {num_keys}, are {offsets.tolist()[:8]}")


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
        None if index is None else index.int(),
        offsets=None if offsets is None else offsets.long(),
        scale=1.0 / tau,
        activation="silu",
    )
    return out
