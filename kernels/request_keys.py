"""Attention to the keys of one's own request: arguments and the CPU path that such operators share.

Shape letters: B requests, C rows (candidates, or events), Q queries a row, H heads, K head width, M keys in all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backends import check_index, check_offsets, check_tensor, require_triton

HEAD_WIDTH_MAX = 128
"""K of the Triton kernels: a tile of queries and its accumulator stay in registers."""


def check_request_keys(
    q_CQHK: Tensor,
    k: Tensor,
    v: Tensor,
    key_offsets: Tensor | None,
    index_C: Tensor | None,
    *,
    keys_letter: str,
    index_name: str,
) -> Tensor:
    """Refuse queries, keys and values that do not fit, and return where each request's keys end.

    Args:
        q_CQHK: Queries.
        k: Keys, dtype of q: jagged [M, H, K] with offsets, or dense [B, M, H, K] without.
        v: Values, like the keys.
        key_offsets: int32 or int64 [B + 1] from 0 to M, non-decreasing; None for dense keys.
        index_C: The request of each row; None for one request.
        keys_letter: The operator's own letter of M, in messages.
        index_name: The operator's own name of the index, in messages.

    Returns:
        [B + 1]: the offsets, or those of dense keys.

    Raises:
        ValueError: a rule is broken.
    """
    check_tensor("q_CQHK", q_CQHK, (None, None, None, None))
    num_rows, _, num_heads, head_width = q_CQHK.shape
    keys, device = f"k_{keys_letter}HK", q_CQHK.device
    if key_offsets is None:
        check_tensor(f"{keys} without key_offsets", k, (None, None, num_heads, head_width), (q_CQHK.dtype,), device)
        num_requests, num_keys = k.shape[:2]
        ends = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_keys
    else:
        check_tensor(f"{keys} with key_offsets", k, (None, num_heads, head_width), (q_CQHK.dtype,), device)
        check_offsets("key_offsets", key_offsets, len(k))
        num_requests, ends = len(key_offsets) - 1, key_offsets
    check_tensor(f"v_{keys_letter}HK", v, k.shape, (q_CQHK.dtype,), device)
    check_index(index_name, index_C, num_rows, num_requests, device)
    return ends


def require_triton_heads(q: Tensor) -> None:
    """Refuse to run a Triton kernel on queries [..., K] if that is impossible.

    Raises:
        BackendUnavailableError: see ``require_triton``.
        ValueError: heads are too wide.
    """
    require_triton(q)
    if q.shape[-1] > HEAD_WIDTH_MAX:
        raise ValueError(f"backend 'triton' takes a head width of at most {HEAD_WIDTH_MAX}, got {q.shape[-1]}")


def attend_by_request(
    q_CQHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    ends: Tensor,
    index_C: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attend in stock torch on a CPU, one request after another.

    Args:
        q_CQHK: Queries.
        k_MHK: Keys.
        v_MHK: Values.
        ends: [B + 1] from 0 to M.
        index_C: The request of each row; None for one request.
        attend: Makes answers [H, R, K] of all R = C Q query rows of one request [H, R, K], its keys [H, K, M] and its
            values [H, M, K].

    Returns:
        [C, Q, H, K], dtype of q; 0 where a request has no keys.
    """
    bounds = ends.tolist()

    def answer(q_CQHK: Tensor, keys: slice) -> Tensor:
        if keys.start == keys.stop:
            return torch.zeros_like(q_CQHK)
        q_HRK = q_CQHK.flatten(0, 1).transpose(0, 1)
        out_HRK = attend(q_HRK, k_MHK[keys].permute(1, 2, 0), v_MHK[keys].transpose(0, 1))
        return out_HRK.transpose(0, 1).reshape(q_CQHK.shape)

    if index_C is None:
        return answer(q_CQHK, slice(0, bounds[1]))
    out = torch.empty_like(q_CQHK)
    sizes = torch.bincount(index_C, minlength=len(ends) - 1).tolist()
    order = torch.argsort(index_C, stable=True)
    for request, mine in enumerate(torch.split(order, sizes)):
        if len(mine):
            out[mine] = answer(q_CQHK[mine], slice(bounds[request], bounds[request + 1]))
    return out
