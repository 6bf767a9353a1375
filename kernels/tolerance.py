"""How far two right answers may differ: one rule for every test and for the check on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNITS = 4.0
"""c of the rule. Rounding errors of a sum of L terms grow like sqrt(L) times the unit roundoff (eps / 2); a bound of
eight roundoffs leaves room for the largest of the thousands of elements that are compared."""


def tolerance(dtype: torch.dtype, reduction_length: int, roundings: int = 1, units: float = UNITS) -> float:
    """Return the largest error allowed, relative to the magnitude of the terms that were summed.

    Products accumulate in float32 whatever the inputs are, so the reduction's part is float32's eps; the storage type
    adds one eps for each time a value is rounded to it on its way (the output, an intermediate kept in that type).

    Args:
        dtype: The type in which values are stored.
        reduction_length: Terms of the longest sum.
        roundings: How often a value on its way is rounded to ``dtype``.
        units: c.

    Returns:
        ``c * (eps(float32) * sqrt(L) + roundings * eps(dtype) / 2)``; for float32 storage the second part is left out.
    """
    accumulated = torch.finfo(torch.float32).eps * math.sqrt(max(reduction_length, 1))
    stored = 0.0 if dtype == torch.float32 else roundings * torch.finfo(dtype).eps / 2
    return units * (accumulated + stored)


def largest_error(found: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> float:
    """Return max |found - expected| / scale; NaN or infinity anywhere in ``found`` alone gives infinity.

    Args:
        found: What a kernel wrote.
        expected: The reference, same shape.
        magnitude: Scale by element, for sums whose terms cancel: the same sum over absolute values. None: the largest
            absolute value of ``expected``.
    """
    if found.shape != expected.shape:
        return math.inf
    if found.numel() == 0:
        return 0.0
    wide, truth = found.double(), expected.double()
    scale = truth.abs().max() if magnitude is None else magnitude.double()
    error = (wide - truth).abs() / scale.clamp_min(torch.finfo(torch.float32).tiny)
    # A value that nobody wrote is NaN in the tests' buffers and must not vanish in a maximum.
    return math.inf if bool(error.isnan().any()) else float(error.max())
