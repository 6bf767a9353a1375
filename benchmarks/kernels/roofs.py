"""The roofs of this machine, measured in the same interleaved rounds as the operator that stands under them.

Compute: a packed product in the operator's precision. Memory: a copy of as many bytes as the operator must move, so
that it finds them in the same cache as the operator does; half of its bytes are writes, an operator that mostly reads
can be faster. A roof is the best of its rounds and an operator's time the median of its own, so that other work on the
machine can make a share smaller, hardly larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.models.subject import CEILING_SIZE, Ceiling
from benchmarks.record import Param
from kernels.roofline import Device, Precision, Work

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY = "roof_copy"


class Roofs:
    """Calls to time beside an operator, and what follows from their times.

    Args:
        num_bytes: That the operator must read and write.
        precisions: Of all of its forms; int8 is measured by ``torch._int_mm``.

    Raises:
        ValueError: a CPU has no product of this precision.
    """

    def __init__(self, num_bytes: float, precisions: Iterable[Precision]) -> None:
        self._ceilings: dict[Precision, Ceiling | Int8Ceiling] = {p: _ceiling(p) for p in sorted(set(precisions))}
        source = torch.zeros(max(1, int(num_bytes) // 8))
        self._copied_bytes = 2 * source.nbytes
        self._copy = partial(torch.empty_like(source).copy_, source)

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        """What is to be timed: name -> call."""
        return {**{f"roof_{precision}": call for precision, call in self._ceilings.items()}, COPY: self._copy}

    def rate(self, precision: Precision, taken: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the rate of a packed product, operations by the unit of its times."""
        return self._ceilings[precision].flops / taken

    def device(self, taken_s: Mapping[str, float]) -> Device:
        """Return the machine as these times show it.

        Args:
            taken_s: Least seconds by name of ``calls``; others are left aside.
        """
        rates = {precision: call.flops / taken_s[f"roof_{precision}"] for precision, call in self._ceilings.items()}
        return Device("this machine", "", rates, self._copied_bytes / taken_s[COPY], "this run")

    def params(self, work: Work, operator_s: float, taken_s: Mapping[str, float]) -> dict[str, Param]:
        """Return what a row says of an operator.

        Args:
            work: Of the operator, in the precision of the form that ran.
            operator_s: Median seconds of one call.
            taken_s: Least seconds of ``calls`` in the same rounds.

        Returns:
            ``flops``, ``bytes``, ``gflops`` and ``gbytes_s`` reached, the two roofs, the ``bound`` and the
            ``roofline_share``: least time over time.
        """
        device = self.device(taken_s)
        point = device.point(work)
        found: dict[str, Param] = {
            "flops": int(work.flops),
            "bytes": int(work.num_bytes),
            "gbytes_s": round(work.num_bytes / operator_s * 1e-9, 2),
            "roof_gbytes_s": round(device.bytes_per_s * 1e-9, 2),
            "bound": point.bound,
            "roofline_share": round(point.share(operator_s), 4),
        }
        if work.flops:
            found["gflops"] = round(work.flops / operator_s * 1e-9, 1)
            found["roof_gflops"] = round(device.flops_per_s[work.precision] * 1e-9, 1)
        return found


def least_s(samples_ms: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """Return the least seconds of calls that ``harness.interleaved`` has timed."""
    return {name: float(taken_ms.min()) * 1e-3 for name, taken_ms in samples_ms.items()}


class Int8Ceiling:
    """The square product of ``Ceiling`` in int8 with int32 sums, without scales."""

    def __init__(self, rows: int = 1_000) -> None:
        self._x = torch.randint(-127, 128, (rows, CEILING_SIZE), dtype=torch.int8)
        self._weight = torch.randint(-127, 128, (CEILING_SIZE, CEILING_SIZE), dtype=torch.int8)
        self.flops = 2 * rows * CEILING_SIZE * CEILING_SIZE

    def __call__(self) -> Tensor:
        """Run one product."""
        return torch._int_mm(self._x, self._weight)


def _ceiling(precision: Precision) -> Ceiling | Int8Ceiling:
    if precision == "int8":
        return Int8Ceiling()
    if precision not in _DTYPES:
        raise ValueError(f"precision must be one of bf16, fp32, int8 on a CPU, is {precision!r}")
    return Ceiling(_DTYPES[precision])
