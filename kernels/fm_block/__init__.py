"""Factorization-machine block: X (X^T Y) in one pass, the request's half of X^T Y added, RMS norm fused. See README.md.

Shape letters: B requests, C candidates, n tokens, k mixtures, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import Backend, check_choice, check_epsilon, check_index, check_tensor, require_triton
from kernels.fm_block import cpu, reference

__all__ = ["NUM_MIXTURES_MAX", "NUM_TOKENS_MAX", "fm_block"]

NUM_TOKENS_MAX = 256
"""n of the Triton kernel: one candidate's products stay in one block's registers."""
NUM_MIXTURES_MAX = 64
"""k of the Triton kernel, for the same reason."""


def fm_block(
    x_CnD: Tensor,
    y_nk: Tensor,
    part_BkD: Tensor | None = None,
    candidate_to_request_C: Tensor | None = None,
    *,
    gain: Tensor | None = None,
    epsilon: float = 1e-6,
    backend: Backend,
) -> Tensor:
    """Return the pairwise products of a candidate's tokens, projected: X (X^T Y + S_r[u(c)]^T).

    No n x n matrix is made; sums are float32.

    Args:
        x_CnD: Tokens; candidate-major, or a transposed view of token-major memory. Last axis contiguous.
        y_nk: Mixtures, dtype of x.
        part_BkD: float32, the request tokens' half of (X^T Y)^T; None: there is none.
        candidate_to_request_C: int32 or int64 in ``[0, B)``; None for one request.
        gain: [n * k], dtype of x: the flattened product is divided by its root mean square and scaled; None: it is not.
        epsilon: Added to the mean square, in [1e-12, 1].
        backend: ``reference``, ``torch`` or ``triton`` (n at most 256, k at most 64).

    Returns:
        [C, n, k], dtype of x.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Source: optimised FM of Wukong, arXiv 2403.02545; the split of the tokens into groups: ROCS, arXiv 2607.27744.
    """
    check_choice("backend", backend, ("reference", "torch", "triton"))
    check_tensor("x_CnD", x_CnD, (None, None, None))
    num_candidates, num_tokens, width = x_CnD.shape
    check_tensor("y_nk", y_nk, (num_tokens, None), (x_CnD.dtype,), x_CnD.device)
    num_mixtures = y_nk.shape[1]
    if part_BkD is not None:
        check_tensor("part_BkD", part_BkD, (None, num_mixtures, width), (torch.float32,), x_CnD.device)
        check_index("candidate_to_request_C", candidate_to_request_C, num_candidates, len(part_BkD), x_CnD.device)
    elif candidate_to_request_C is not None:
        raise ValueError("candidate_to_request_C needs part_BkD, which is None")
    if gain is not None:
        check_tensor("gain", gain, (num_tokens * num_mixtures,), (x_CnD.dtype,), x_CnD.device)
        check_epsilon(epsilon)
    if backend == "reference":
        return reference.fm_block(x_CnD, y_nk, part_BkD, candidate_to_request_C, gain, epsilon)
    if backend == "torch":
        return cpu.fm_block(x_CnD, y_nk, part_BkD, candidate_to_request_C, gain, epsilon)
    require_triton(x_CnD)
    if num_tokens > NUM_TOKENS_MAX or num_mixtures > NUM_MIXTURES_MAX:
        raise ValueError(
            f"backend 'triton' takes at most {NUM_TOKENS_MAX} tokens and {NUM_MIXTURES_MAX} mixtures, "
            f"got {num_tokens} and {num_mixtures}"
        )
    from kernels.fm_block import triton_kernel

    return triton_kernel.fm_block(x_CnD, y_nk, part_BkD, candidate_to_request_C, gain, epsilon)
