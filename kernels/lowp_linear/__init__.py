"""Linear layers in FP8, MXFP8, int8 and bf16, with the quantize step fused into the RMS norm before it. See README.md.

Shape letters: M rows (candidates), N outputs, K inputs.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kernels.backends import (
    FLOAT_DTYPES,
    Backend,
    BackendUnavailableError,
    check_choice,
    check_epsilon,
    check_tensor,
    native_library,
    require_triton,
)
from kernels.lowp_linear import cpu, reference
from kernels.lowp_linear.formats import MX_BLOCK, Quantized, quantize_fp8_rows, quantize_int8_rows, quantize_mxfp8
from kernels.packed_linear import PackedLinear

__all__ = ["FORMATS", "LowpFormat", "LowpLinear", "Quantized", "quantize", "rms_norm_quantize"]

LowpFormat: TypeAlias = Literal["bf16", "int8", "fp8_rowwise", "mxfp8"]
FORMATS: dict[str, tuple[Backend, ...]] = {
    "bf16": ("reference", "torch"),
    "int8": ("reference", "torch", "native"),
    "fp8_rowwise": ("reference", "torch", "triton"),
    "mxfp8": ("reference",),
}
"""The backends of each format."""

FP8_MULTIPLE = 16
"""K of an FP8 product is a multiple of this outside the reference: tensor cores read 16-byte rows."""
_QUANTIZERS = {"int8": quantize_int8_rows, "fp8_rowwise": quantize_fp8_rows, "mxfp8": quantize_mxfp8}


class LowpLinear:
    """x W^T with weight and rows of x in a low-precision format, scaled by row and by output channel.

    Args:
        weight_NK: Any float dtype; quantized here, once.
        format: ``bf16``; ``int8``: symmetric, one scale a row and one an output; ``fp8_rowwise``: e4m3 likewise;
            ``mxfp8``: e4m3 in blocks of 32 along K with a power-of-two scale.
        backend: See ``FORMATS``; ``torch`` with FP8 is emulated on CPUs.

    Raises:
        ValueError: a shape or name breaks a rule, or the format has no such backend.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(self, weight_NK: Tensor, *, format: LowpFormat, backend: Backend) -> None:
        _check_format(format, backend)
        check_tensor("weight_NK", weight_NK, (None, None))
        _check_inputs(format, backend, weight_NK.shape[1])
        self.format, self.backend, self.device = format, backend, weight_NK.device
        self.num_outputs, self.num_inputs = weight_NK.shape
        if backend == "triton":
            require_triton(weight_NK)
        if format == "bf16":
            self._plain = weight_NK.detach().bfloat16()
            self._packed = PackedLinear(self._plain) if backend == "torch" else None
        elif backend == "native":
            self._int8 = native_library(weight_NK).Int8Linear(weight_NK.detach().float().contiguous())
        else:
            self.weight = _QUANTIZERS[format](weight_NK.detach())
            if format == "int8" and backend == "torch":
                if weight_NK.device.type != "cpu":
                    raise BackendUnavailableError(
                        f"format 'int8' of backend 'torch' runs on CPUs, the weight is on {weight_NK.device}"
                    )
                self._int8 = cpu.Int8Linear(self.weight)

    def __call__(self, x_MK: Tensor, gain_K: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
        """Quantize rows, after their RMS norm if there is a gain, and multiply: [M, K] -> [M, N], dtype of x.

        Args:
            x_MK: Any float dtype; ``native`` takes float32 and bfloat16.
            gain_K: Of the norm, dtype of x; None: rows are not normalised.
            epsilon: Of the norm, in [1e-12, 1].

        Raises:
            ValueError: a shape or dtype is wrong.
        """
        dtypes = (torch.float32, torch.bfloat16) if self.backend == "native" else FLOAT_DTYPES
        check_tensor("x_MK", x_MK, (None, self.num_inputs), dtypes, self.device)
        if gain_K is not None:
            check_tensor("gain_K", gain_K, (self.num_inputs,), (x_MK.dtype,), x_MK.device)
            check_epsilon(epsilon)
        if self.format == "bf16":
            rows = x_MK if gain_K is None else reference.rms_norm(x_MK, gain_K, epsilon)
            if self._packed is not None:
                return self._packed(rows.bfloat16()).to(x_MK.dtype)
            return (rows.bfloat16().float() @ self._plain.float().T).to(x_MK.dtype)
        if self.backend == "native":
            gain = None if gain_K is None else gain_K.float()
            stored = torch.float32 if x_MK.dtype == torch.float32 else torch.bfloat16
            out: Tensor = self._int8(x_MK.contiguous(), gain=gain, epsilon=epsilon, out_dtype=stored)
            return out
        if gain_K is None:
            return self.multiply(quantize(x_MK, format=self.format, backend=self.backend), x_MK.dtype)
        normed = rms_norm_quantize(x_MK, gain_K, format=self.format, backend=self.backend, epsilon=epsilon)
        return self.multiply(normed, x_MK.dtype)

    def multiply(self, rows: Quantized, dtype: torch.dtype) -> Tensor:
        """Multiply rows that are quantized already, by ``quantize`` or ``rms_norm_quantize``.

        Args:
            rows: [M, K] of this layer's format.
            dtype: Of the result.

        Returns:
            [M, N].

        Raises:
            ValueError: format or shape differ from the layer's, or the layer is bf16 or native.
        """
        if self.format == "bf16" or self.backend == "native":
            raise ValueError(
                f"multiply needs a quantized weight, format {self.format!r} of {self.backend!r} keeps none"
            )
        check_choice("format of rows", rows.format, (self.format,))
        check_tensor("rows", rows.values, (None, self.num_inputs), (rows.values.dtype,))
        if self.backend == "reference":
            return reference.multiply(rows, self.weight, dtype)
        if self.format == "int8":
            product: Tensor = self._int8(rows, dtype)
            return product
        if self.backend == "torch":
            return cpu.multiply_fp8(rows, self.weight, dtype)
        from kernels.lowp_linear import triton_kernel

        return triton_kernel.multiply_fp8(rows, self.weight, dtype)


def quantize(x_MK: Tensor, *, format: LowpFormat, backend: Backend) -> Quantized:
    """Quantize the rows of a matrix.

    Args:
        x_MK: Any float dtype.
        format: Not ``bf16``.
        backend: As of ``LowpLinear``; ``torch`` is what ``reference`` is, ``native`` gives a row of zeros the scale 0.

    Raises:
        ValueError: a shape or name breaks a rule.
        BackendUnavailableError: the backend cannot run here.
    """
    _check_quantizer(x_MK, format, backend)
    if backend == "native":
        values, scales = native_library(x_MK).quantize_rows(x_MK.contiguous())
        return Quantized(values, scales, "int8")
    if backend != "triton":
        return _QUANTIZERS[format](x_MK)
    from kernels.lowp_linear import triton_kernel

    return triton_kernel.quantize_fp8(x_MK, None, 0.0)


def rms_norm_quantize(
    x_MK: Tensor, gain_K: Tensor, *, format: LowpFormat, backend: Backend, epsilon: float = 1e-6
) -> Quantized:
    """Divide rows by their root mean square, scale by a gain, quantize; nothing is rounded in between.

    Args:
        x_MK: Any float dtype.
        gain_K: Dtype of x.
        format: Not ``bf16``.
        backend: As of ``quantize``.
        epsilon: Added to the mean square, in [1e-12, 1].

    Raises:
        ValueError: a shape or name breaks a rule.
        BackendUnavailableError: the backend cannot run here.
    """
    _check_quantizer(x_MK, format, backend)
    check_tensor("gain_K", gain_K, (x_MK.shape[1],), (x_MK.dtype,), x_MK.device)
    check_epsilon(epsilon)
    if backend == "native":
        values, scales = native_library(x_MK).quantize_rows(x_MK.contiguous(), gain_K.float(), epsilon)
        return Quantized(values, scales, "int8")
    if backend != "triton":
        return _QUANTIZERS[format](reference.rms_norm(x_MK, gain_K, epsilon))
    from kernels.lowp_linear import triton_kernel

    return triton_kernel.quantize_fp8(x_MK, gain_K, epsilon)


def _check_format(format: str, backend: str) -> None:
    check_choice("format", format, tuple(FORMATS))
    check_choice(f"backend of format {format!r}", backend, FORMATS[format])


def _check_quantizer(x_MK: Tensor, format: str, backend: str) -> None:
    _check_format(format, backend)
    check_choice("format", format, tuple(_QUANTIZERS))
    dtypes = (torch.float32, torch.bfloat16) if backend == "native" else FLOAT_DTYPES
    check_tensor("x_MK", x_MK, (None, None), dtypes)
    _check_inputs(format, backend, x_MK.shape[1])
    if backend == "triton":
        require_triton(x_MK)


def _check_inputs(format: str, backend: str, num_inputs: int) -> None:
    multiple = 1
    if format == "mxfp8":
        multiple = MX_BLOCK
    elif format == "fp8_rowwise" and backend != "reference":
        multiple = FP8_MULTIPLE
    if num_inputs % multiple:
        raise ValueError(f"K of format {format!r} must be a multiple of {multiple}, is {num_inputs}")
