"""Stock torch: int8 by oneDNN's VNNI product, FP8 by torch's scaled product (emulated on CPUs).

On one core of an AMD Zen 5 the int8 product runs at 945-965 GOP/s against 495 GFLOP/s of packed bf16; with the quantize
step in eager torch before it 484-600 remain. FP8 runs at 68-86 there: it is for judging accuracy, not for speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lowp_linear.formats import Quantized

_ZERO_POINT = 128


class Int8Linear:
    """An int8 product of rows with their own scales and a weight packed once.

    Args:
        weight: int8 [N, K], one scale an output.
    """

    def __init__(self, weight: Quantized) -> None:
        self.num_outputs = len(weight.values)
        self._packed = torch.ops.onednn.qlinear_prepack(weight.values.contiguous(), None)
        self._scales = weight.scales
        self._zero_points = torch.zeros(self.num_outputs, dtype=torch.int32)

    def __call__(self, rows: Quantized, dtype: torch.dtype) -> Tensor:
        """Multiply: [M, K] -> [M, N].

        VNNI multiplies unsigned with signed bytes, so rows move up by 128 and oneDNN takes the shift away again.
        """
        if len(rows.values) == 0:
            return torch.empty(0, self.num_outputs, dtype=dtype)
        unsigned = (rows.values.to(torch.int16) + _ZERO_POINT).to(torch.uint8)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, _ZERO_POINT, self._packed, self._scales, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product.mul_(rows.scales[:, None]).to(dtype)


def multiply_fp8(rows: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply with row-wise scales: [M, K] -> [M, N]; torch's product leaves in bf16."""
    if len(rows.values) == 0:
        return torch.empty(0, len(weight.values), dtype=dtype, device=rows.values.device)
    product = torch._scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
    )
    return product.to(dtype)
