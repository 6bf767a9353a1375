"""RMS norms of jagged rows, with the residual added on the way: a row at a time, or a whole sequence. See README.md.

Shape letters: B sequences, T rows of all sequences, D width.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.backends import Backend, check_choice, check_epsilon, check_tensor, require_triton
from kernels.jagged_norm import cpu, reference

__all__ = ["WIDTH_MAX", "Over", "jagged_norm"]

Over: TypeAlias = Literal["row", "sequence"]

WIDTH_MAX = 4_096
"""D of the Triton kernel: a row stays in registers."""


def jagged_norm(
    x_TD: Tensor,
    gain_D: Tensor,
    offsets: Tensor,
    *,
    residual_TD: Tensor | None = None,
    over: Over = "row",
    epsilon: float = 1e-6,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Add the residual, divide by the root mean square, scale by the gain.

    Args:
        x_TD: Rows of all sequences, jagged by ``offsets``; what lies behind the last offset is padding.
        gain_D: Gain, dtype of x.
        offsets: int32 or int64 [B + 1] from 0 to at most T, non-decreasing.
        residual_TD: Added to x before the norm, dtype of x; None: nothing is added.
        over: ``row``: the mean square of each row's D entries; ``sequence``: of all entries of its sequence.
        epsilon: Added to the mean square, in [1e-12, 1].
        backend: ``reference``, ``torch`` or ``triton`` (D at most 4,096).

    Returns:
        The sum x + residual (x itself without a residual) and its norm, both [T, D] of x's dtype; padding is 0 in the
        norm.

    Raises:
        ValueError: shapes, dtypes or names break a rule.
        BackendUnavailableError: the backend cannot run here.
    """
    check_choice("backend", backend, ("reference", "torch", "triton"))
    check_choice("over", over, ("row", "sequence"))
    check_tensor("x_TD", x_TD, (None, None))
    num_rows, width = x_TD.shape
    check_tensor("gain_D", gain_D, (width,), (x_TD.dtype,), x_TD.device)
    check_epsilon(epsilon)
    check_tensor("offsets", offsets, (None,), (torch.int32, torch.int64))
    if len(offsets) == 0:
        raise ValueError("offsets must be [B + 1], is empty")
    # On a GPU the check would wait for the device.
    if offsets.device.type == "cpu" and (
        int(offsets[0]) != 0 or int(offsets[-1]) > num_rows or bool((offsets.diff() < 0).any())
    ):
        raise ValueError(f"offsets must rise from 0 to at most {num_rows}, are {offsets.tolist()[:8]}")
    if residual_TD is not None:
        check_tensor("residual_TD", residual_TD, x_TD.shape, (x_TD.dtype,), x_TD.device)
    if backend == "reference":
        return reference.jagged_norm(x_TD, gain_D, offsets, residual_TD, over, epsilon)
    if backend == "torch":
        return cpu.jagged_norm(x_TD, gain_D, offsets, residual_TD, over, epsilon)
    require_triton(x_TD)
    if width > WIDTH_MAX:
        raise ValueError(f"backend 'triton' takes a width of at most {WIDTH_MAX}, got {width}")
    from kernels.jagged_norm import triton_kernel

    return triton_kernel.jagged_norm(x_TD, gain_D, offsets, residual_TD, over, epsilon)
