"""Grouped GEMM: many linear layers of one shape over jagged groups of rows, in one launch. See README.md.

Shape letters: T rows of all groups, G groups, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends import Backend, check_choice, check_offsets, check_tensor, require_triton
from kernels.grouped_gemm import cpu, reference

__all__ = ["grouped_gemm"]


def grouped_gemm(x_TK: Tensor, weight_GNK: Tensor, offsets: Tensor, *, backend: Backend) -> Tensor:
    """Multiply the rows of each group by the group's own weight, transposed.

    Args:
        x_TK: Rows of all groups, one after another.
        weight_GNK: One weight a group, dtype of x.
        offsets: int32 or int64 [G + 1] from 0 to T on x's device, non-decreasing; group g has rows
            ``offsets[g]:offsets[g + 1]``, perhaps none. Read on the device; their values are checked on CPUs only.
        backend: ``reference``, ``torch`` or ``triton``.

    Returns:
        [T, N], dtype of x.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.

    Example:
        >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[2.0, 0.0]]])
        >>> grouped_gemm(x, weight, torch.tensor([0, 1, 3]), backend="reference").T
        tensor([[2., 2., 2.]])
    """
    check_choice("backend", backend, ("reference", "torch", "triton"))
    check_tensor("x_TK", x_TK, (None, None))
    check_tensor("weight_GNK", weight_GNK, (None, None, x_TK.shape[1]), (x_TK.dtype,), x_TK.device)
    check_tensor("offsets", offsets, (len(weight_GNK) + 1,), (torch.int32, torch.int64))
    if offsets.device != x_TK.device:
        raise ValueError(f"offsets must be on {x_TK.device}, are on {offsets.device}")
    check_offsets("offsets", offsets, len(x_TK))
    if backend == "reference":
        return reference.grouped_gemm(x_TK, weight_GNK, offsets)
    if backend == "torch":
        return cpu.grouped_gemm(x_TK, weight_GNK, offsets)
    require_triton(x_TK)
    from kernels.grouped_gemm import triton_kernel

    return triton_kernel.grouped_gemm(x_TK, weight_GNK, offsets)
