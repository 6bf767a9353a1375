"""The formats: how values become narrow ones with scales, and back. Rounding is to nearest even.

Source: OCP Microscaling Formats (MX) v1.0 for MXFP8; "RCEIL", the scale that is rounded up so that the largest value of
a block always fits, is what torchao uses for inference. The floor rule of the specification can saturate the largest
value: up to 12.5% of it is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT8_MAX = 127
MX_BLOCK = 32
E8M0_BIAS = 127
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized matrix.

    Args:
        values: [M, K], int8 or float8_e4m3fn.
        scales: float32 [M], a row's value is ``values * scale``; of MXFP8 uint8 [M, K / 32], 2 ** (byte - 127).
        format: ``int8``, ``fp8_rowwise`` or ``mxfp8``.
    """

    values: Tensor
    scales: Tensor
    format: str

    def dequantize(self) -> Tensor:
        """Return float32 [M, K]."""
        if self.format == "mxfp8":
            scales = decode_e8m0(self.scales).repeat_interleave(MX_BLOCK, 1)
            return self.values.float() * scales
        return self.values.float() * self.scales[:, None]


def quantize_fp8_rows(x_MK: Tensor) -> Quantized:
    """Quantize to e4m3 with one scale a row: its largest absolute value becomes 448."""
    x = x_MK.float()
    scales = row_scales(x, E4M3_MAX)
    return Quantized(to_e4m3(x / scales[:, None]), scales, "fp8_rowwise")


def quantize_int8_rows(x_MK: Tensor) -> Quantized:
    """Quantize to int8 with one scale a row, symmetric: its largest absolute value becomes 127."""
    x = x_MK.float()
    scales = row_scales(x, INT8_MAX)
    values = torch.round(x / scales[:, None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Quantized(values, scales, "int8")


def quantize_mxfp8(x_MK: Tensor) -> Quantized:
    """Quantize to e4m3 with a power-of-two scale for every 32 values of a row.

    Args:
        x_MK: K a multiple of 32.
    """
    num_rows, num_inputs = x_MK.shape
    blocks = x_MK.float().view(num_rows, num_inputs // MX_BLOCK, MX_BLOCK)
    scales = encode_e8m0(blocks.abs().amax(-1))
    values = to_e4m3(blocks / decode_e8m0(scales)[..., None]).view(num_rows, num_inputs)
    return Quantized(values, scales, "mxfp8")


def row_scales(x_MK: Tensor, largest: float) -> Tensor:
    """Return max |row| / largest, float32 [M]; 1 for a row of zeros, NaN where a NaN is, which must not be lost."""
    if x_MK.shape[1] == 0:
        return torch.ones(len(x_MK), dtype=torch.float32, device=x_MK.device)
    most = x_MK.abs().amax(1)
    # Below the least normal number the quotient would lose its bits, or be zero.
    return torch.where(most == 0, torch.ones_like(most), (most / largest).clamp_min(_TINY))


def encode_e8m0(most: Tensor) -> Tensor:
    """Return the least power of two s with ``most <= 448 s`` as its biased exponent, uint8; exact.

    448 is 0.875 * 2^9, so with most = m * 2^e, 0.5 <= m < 1, the exponent is e - 9, one more if m > 0.875.
    """
    mantissa, exponent = torch.frexp(most)
    power = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    power = torch.where(most > 0, power, -E8M0_BIAS)
    return (power + E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def decode_e8m0(scales: Tensor) -> Tensor:
    """Return 2 ** (byte - 127), float32; 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).float()


def to_e4m3(x: Tensor) -> Tensor:
    """Cast to e4m3, saturating at 448: the cast alone does so in current torch, older versions gave NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
