"""The plain truth: values are taken back to float32 and multiplied there."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lowp_linear.formats import Quantized


def multiply(rows: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return rows times weight transposed, [M, N]."""
    return (rows.dequantize() @ weight.dequantize().T).to(dtype)


def rms_norm(x_MK: Tensor, gain_K: Tensor, epsilon: float) -> Tensor:
    """Return the normalised rows in float32, so that they are rounded once, by the quantizer."""
    x = x_MK.float()
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + epsilon) * gain_K.float()
