"""Rows: what one check found, as JSON and as a line of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kernels.gpu_check.check import Check
from kernels.roofline import Bound, Work

HEADER = (
    f"{'check':<62} {'error':>9} {'allowed':>9} {'fused us':>9} {'torch us':>9} {'ratio':>6} {'TFLOP/s':>8} "
    f"{'GB/s':>7} {'roof':>5}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One check's result.

    Args:
        op: The operator's folder.
        shape: The check within it.
        device: Name of the GPU.
        versions: Of torch and triton.
        seed: Of the inputs.
        ok: The error is within the tolerance, and nothing was raised.
        error: Largest relative error; None if the kernel raised.
        tolerance: What was allowed.
        failure: What was raised; empty if nothing.
        fused_us: Quantiles 0.2, 0.5 and 0.8 of one call, microseconds; None if not timed.
        unfused_us: The same of the torch form, interleaved with the kernel in the same run.
        tflops: Useful 10^12 operations a second at the median.
        gbytes_per_s: Necessary 10^9 bytes a second at the median.
        bound: What the device's roofline says limits this work, ``compute`` or ``memory``.
        roofline_share: Least time that the roofline allows over the median; None if not timed or if the device's roofs
            are not known. Above 1 where inputs lie in the L2 cache, which the roofline takes to be in memory.
    """

    op: str
    shape: str
    device: str
    versions: str
    seed: int
    ok: bool
    error: float | None
    tolerance: float | None
    failure: str = ""
    fused_us: tuple[float, float, float] | None = None
    unfused_us: tuple[float, float, float] | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None
    bound: Bound | None = None
    roofline_share: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster the kernel is than the torch form, by medians."""
        if self.fused_us is None or self.unfused_us is None:
            return None
        return self.unfused_us[1] / self.fused_us[1]

    def as_json(self) -> str:
        """Return one JSON line, the ratio included."""
        return json.dumps({**asdict(self), "ratio": self.ratio}, sort_keys=True)

    def as_line(self) -> str:
        """Return one line of the table under ``HEADER``."""
        name = f"{self.op} {self.shape}"
        if self.failure:
            return f"{name:<62} RAISED {self.failure}"
        fused = None if self.fused_us is None else self.fused_us[1]
        unfused = None if self.unfused_us is None else self.unfused_us[1]
        line = f"{name:<62} {_number(self.error, '9.2e')} {_number(self.tolerance, '9.2e')} {_number(fused, '9.1f')} "
        line += f"{_number(unfused, '9.1f')} {_number(self.ratio, '6.2f')} {_number(self.tflops, '8.1f')} "
        line += f"{_number(self.gbytes_per_s, '7.0f')} {_number(self.roofline_share, '5.2f')}"
        return line if self.ok else f"{line}  WRONG"


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the quantiles 0.2, 0.5 and 0.8, each a sample (the nearest rank).

    Raises:
        ValueError: there are none.
    """
    if not samples:
        raise ValueError("samples must be at least one, are 0")
    ordered = sorted(samples)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))
    return low, middle, high


def rates(work: Work, median_us: float) -> tuple[float, float]:
    """Return TFLOP/s and GB/s of one call that takes so long."""
    return work.flops / median_us * 1e-6, work.num_bytes / median_us * 1e-3


def raised(check: Check, error: BaseException, device: str, versions: str, seed: int) -> Row:
    """Return the row of a check that raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return Row(check.op, check.shape, device, versions, seed, ok=False, error=None, tolerance=None, failure=text)


def _number(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return " " * (width - 1) + "-" if value is None else format(value, form)
