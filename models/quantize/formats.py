"""Linears in the number formats that a CPU may run fast: float32 in, float32 out, whatever is in between.

No format mixes rows: int8 scales each row by itself, and oneDNN's packed products give a row the same bits in any batch
(measured for 1 to 500 rows). So scores do not depend on which other candidates are in a batch.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from kernels.backends import BackendUnavailableError
from kernels.lowp_linear import LowpLinear
from shared.clock import Clock

Format: TypeAlias = Literal["fp32", "fp32_packed", "bf16_packed", "int8", "int8_native"]
"""``fp32``: torch's own product; ``packed``: oneDNN with weights laid out ahead; ``int8``: both sides in 8 bits, the
weights scaled by output channel, the inputs by row when they come; ``native``: the same with the C++ kernels."""

FORMATS: Final[tuple[Format, ...]] = ("fp32", "fp32_packed", "bf16_packed", "int8", "int8_native")

INT8_MAX: Final = 127.0
_ROW_SCALE_MIN: Final = 1e-30
_PROBE_SIZE: Final = 256
_PROBE_SLOWER_MAX: Final = 2.0
_PROBE_ROUNDS: Final = 5


class PackedLinear(nn.Module):
    """A linear whose weights oneDNN has laid out for one number format.

    Args:
        weight: float32 [N, K].
        dtype: Of the product; sums are float32.
        num_rows: Rows that the layout is for; others work too.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, num_rows: int) -> None:
        super().__init__()
        self._dtype = dtype
        # Not a buffer: a packed tensor can be neither copied nor stored.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), num_rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map: float32 [.., K] -> float32 [.., N]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._packed, None, "none", [], "")
        return out.float()


class Int8Linear(nn.Module):
    """A linear in 8 bits with 32-bit sums, symmetric on both sides.

    Args:
        weight: float32 [N, K].
    """

    weight_kn: Tensor
    scale_n: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.detach().abs().amax(dim=1).clamp_min(_ROW_SCALE_MIN) / INT8_MAX
        self.register_buffer("weight_kn", torch.round(weight.detach() / scale[:, None]).to(torch.int8).t())
        self.register_buffer("scale_n", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map: float32 [.., K] -> float32 [.., N]."""
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(_ROW_SCALE_MIN) / INT8_MAX
        sums = torch._int_mm(torch.round(rows / scale).to(torch.int8), self.weight_kn)
        return (sums * (scale * self.scale_n)).view(*x.shape[:-1], -1)


class NativeInt8Linear(nn.Module):
    """``Int8Linear`` with quantisation and product in one C++ kernel.

    Args:
        weight: float32 [N, K].

    Raises:
        kernels.backends.BackendUnavailableError: the kernels cannot run here.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._linear = LowpLinear(weight.detach(), format="int8", backend="native")

    def forward(self, x: Tensor) -> Tensor:
        """Map: float32 [.., K] -> float32 [.., N]."""
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def linear_in(weight: Tensor, number_format: Format, num_rows: int = 512) -> nn.Module:
    """Return a linear without bias in a format, ready to serve.

    Args:
        weight: float32 [N, K].
        number_format: The format.
        num_rows: Rows that it will mostly see.

    Raises:
        kernels.backends.BackendUnavailableError: the format's kernels cannot run here.
    """
    if number_format == "int8":
        return Int8Linear(weight)
    if number_format == "int8_native":
        return NativeInt8Linear(weight)
    if number_format == "fp32":
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
        return plain
    return PackedLinear(weight, torch.bfloat16 if number_format == "bf16_packed" else torch.float32, num_rows)


def missing(number_format: Format) -> str:
    """Say why a format cannot run here; "" where it can, however slowly."""
    try:
        linear_in(torch.zeros(1, 1), number_format)
    except BackendUnavailableError as error:
        return str(error)
    return ""


def formats_of_device(clock: Clock) -> dict[Format, str]:
    """Say which formats this device may run fast: format -> why not, "" for those that may.

    Without its instructions a format can be hundreds of times slower than float32 (bfloat16 without AVX512-BF16), which
    one small product shows; timing layers in it would take minutes.
    """
    if not torch._C._has_mkldnn:
        return {name: "" if name == "fp32" else "torch has no oneDNN" for name in FORMATS}
    weight = torch.randn(_PROBE_SIZE, _PROBE_SIZE)
    rows = torch.randn(_PROBE_SIZE, _PROBE_SIZE)
    plain_s = _best_s(linear_in(weight, "fp32"), rows, clock)
    found: dict[Format, str] = {"fp32": ""}
    for name in FORMATS[1:]:
        if why := missing(name):
            found[name] = why
            continue
        slower = _best_s(linear_in(weight, name), rows, clock) / max(plain_s, 1e-9)
        found[name] = "" if slower <= _PROBE_SLOWER_MAX else f"a {_PROBE_SIZE}^3 product took {slower:.0f} times fp32"
    return found


@torch.inference_mode()
def _best_s(linear: nn.Module, rows: Tensor, clock: Clock) -> float:
    times = []
    for _ in range(_PROBE_ROUNDS):
        begin_s = clock.monotonic_s()
        linear(rows)
        times.append(clock.monotonic_s() - begin_s)
    return min(times)
