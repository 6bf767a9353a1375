"""PackedLinear: a linear map on the CPU with its weight in oneDNN's own layout, and the probe that chooses its dtype.

Packing pays: on one core of an AMD Zen 4/5 a packed bf16 product runs at about 495 GFLOP/s where ``F.linear`` reaches
395-470, and a packed float32 one at 245 where ``F.linear``, which takes MKL's AVX2 path there, reaches 105. The bias
may be float32 beside bf16 inputs: it is added to the float32 accumulator, before the only rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import Activation

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """act(x W^T + bias), packed where oneDNN runs and plain elsewhere (GPU tensors, float16).

    A packed weight cannot be copied or pickled: pack inside the process that runs it.

    Args:
        weight: [N, K]; the map runs in its dtype.

    Raises:
        ValueError: it is no such matrix.
    """

    def __init__(self, weight: Tensor) -> None:
        if weight.dim() != 2 or min(weight.shape) < 1:
            raise ValueError(f"weight must be [N, K] with N and K at least 1, is {list(weight.shape)}")
        self.num_outputs, self.num_inputs = weight.shape
        self.is_packed = weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and torch._C._has_mkldnn
        weight = weight.detach().contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.is_packed else weight

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: Activation = "none") -> Tensor:
        """Run the map.

        Args:
            x: [M, K], dtype of the weight.
            bias: float32 [N], added before the only rounding where packed; None: nothing is added.
            activation: What follows.

        Returns:
            [M, N], dtype of ``x``.
        """
        if self.is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
            # Not oneDNN's own: it makes 0 of NaN, and what is broken would look like an answer.
            return out.relu_() if activation == "relu" else out
        product = functional.linear(x, self.weight)
        if bias is not None:
            product = (product.float() + bias).to(x.dtype)
        return functional.relu(product) if activation == "relu" else product


@dataclass(frozen=True, slots=True)
class DtypeProbe:
    """What one product of each dtype was measured to do on this machine, now.

    Args:
        bf16_gflops: Rate of a packed bfloat16 product, GFLOP/s.
        fp32_gflops: Rate of a packed float32 product, GFLOP/s.
    """

    bf16_gflops: float
    fp32_gflops: float

    @property
    def dtype(self) -> torch.dtype:
        """The faster of the two; float32 unless bfloat16 gains something."""
        return torch.bfloat16 if self.bf16_gflops > self.fp32_gflops else torch.float32


def probe_dtypes(size: int = 256, rounds: int = 25) -> DtypeProbe:
    """Time one packed product of ``size`` cubed in bfloat16 and in float32.

    To be asked at start: without AVX512-BF16 or AMX the same bfloat16 product falls to about 1 GFLOP/s.

    Args:
        size: M, N and K.
        rounds: Repeats; the fastest counts.
    """
    rates = {}
    for dtype in _PACKED_DTYPES:
        x = torch.ones(size, size, dtype=dtype)
        linear = PackedLinear(x)
        linear(x)
        fastest = float("inf")
        for _ in range(rounds):
            begin = time.perf_counter()
            linear(x)
            fastest = min(fastest, time.perf_counter() - begin)
        rates[dtype] = 2e-9 * size**3 / fastest
    return DtypeProbe(bf16_gflops=rates[torch.bfloat16], fp32_gflops=rates[torch.float32])
