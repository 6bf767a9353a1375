"""The plain truth: one float32 product."""

from __future__ import annotations

from torch import Tensor


def linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x W^T, [M, N], in the dtype of x."""
    return (x_MK.float() @ weight_NK.float().T).to(x_MK.dtype)
