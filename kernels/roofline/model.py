"""The model: work, device, and the point that both make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Precision: TypeAlias = Literal["bf16", "fp8", "int8", "fp32"]
"""What multiplies: tensor cores (or a CPU's dot-product instructions) in a format, or ``fp32`` outside tensor cores."""

Bound: TypeAlias = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True)
class Work:
    """What one call asks of a device, however it is computed.

    Args:
        flops: Useful operations, a multiply-add is 2; at least 0. Exponentials, comparisons and padding do not count.
        num_bytes: Bytes that must be read and written once; above 0.
        precision: Of the multiplications.

    Raises:
        ValueError: a number is out of range.
    """

    flops: float
    num_bytes: float
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        if not self.flops >= 0 or not self.num_bytes > 0:
            raise ValueError(f"flops must be at least 0 and bytes above 0, are {self.flops:g} and {self.num_bytes:g}")

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP a byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """The two roofs of a device.

    Args:
        name: For people.
        torch_name: As ``torch.cuda.get_device_name`` says it; empty for a CPU.
        flops_per_s: Peak rates, dense.
        bytes_per_s: Of the memory, reads and writes together.
        source: Where the numbers are from.
    """

    name: str
    torch_name: str
    flops_per_s: Mapping[Precision, float]
    bytes_per_s: float
    source: str

    def ridge(self, precision: Precision) -> float:
        """Return the intensity from which on arithmetic is the bound, FLOP a byte.

        Raises:
            ValueError: the device has no rate for it.
        """
        return self._peak(precision) / self.bytes_per_s

    def point(self, work: Work) -> Point:
        """Return where some work lies under the roofs.

        Raises:
            ValueError: the device has no rate for its precision.
        """
        compute_s = work.flops / self._peak(work.precision) if work.flops else 0.0
        memory_s = work.num_bytes / self.bytes_per_s
        return Point(work, "compute" if compute_s > memory_s else "memory", max(compute_s, memory_s))

    def _peak(self, precision: Precision) -> float:
        if precision not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise ValueError(f"precision must be one of {known} on {self.name}, is {precision!r}")
        return self.flops_per_s[precision]


@dataclass(frozen=True, slots=True)
class Point:
    """Some work on a device.

    Args:
        work: Its FLOPs and bytes.
        bound: The roof above it.
        least_s: Time of one call that the roofs allow at best, seconds.
    """

    work: Work
    bound: Bound
    least_s: float

    @property
    def flops_per_s(self) -> float:
        """Attainable rate: the height of the roof at this intensity."""
        return self.work.flops / self.least_s

    def share(self, taken_s: float) -> float:
        """Return the share of the roofline that a call reached: least time over the time that it took.

        Raises:
            ValueError: the time is not above 0.
        """
        if not taken_s > 0:
            raise ValueError(f"taken_s must be above 0, is {taken_s:g}")
        return self.least_s / taken_s


H200_SXM = Device(
    "H200 SXM",
    "NVIDIA H200",
    {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12},
    4.8e12,
    "NVIDIA H200 Tensor Core GPU data sheet, column SXM; tensor-core rates halved, for it gives them with sparsity",
)

EPYC_CORE = Device(
    "one core of an AMD EPYC (Zen 4)",
    "",
    {"bf16": 210e9, "int8": 400e9},
    24e9,
    "measured on one thread, the best rounds of several runs beside other work: oneDNN's packed product and "
    "torch._int_mm of 1,000 x 1,024 x 1,024, and a copy of 128 MiB to 128 MiB",
)


def device_called(torch_name: str) -> Device | None:
    """Return the GPU that torch calls so; None where its roofs are not known: then nothing is said of shares."""
    return H200_SXM if torch_name == H200_SXM.torch_name else None
