"""What tests of the native kernels share: the library, built once into its cache, and the tolerance."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from kernels.native import status
from kernels.native.build import BuildError, build
from kernels.tolerance import largest_error, tolerance


@functools.cache
def _why_not() -> str:
    try:
        build()
    except BuildError as error:
        return str(error)
    return status().reason


def require_native() -> None:
    """Build the library if it is not in the cache; skip the test where there is no compiler or not the instructions."""
    if reason := _why_not():
        pytest.skip(f"native kernels: {reason.splitlines()[0]}")


def assert_close(found: Tensor, expected: Tensor, *, dtype: torch.dtype, reduction: int, roundings: int = 1) -> None:
    """Compare within the tolerance of ``kernels.tolerance``, the root mean square of all errors within one unit of it.

    Args:
        found: Must be finite.
        expected: Of the same shape.
        dtype: In which values are stored on the way.
        reduction: Terms of the longest sum.
        roundings: Roundings to ``dtype`` on the way to one element. Their errors are independent and add up like their
            root, so that is how many of them the bound counts at full size.
    """
    assert torch.isfinite(found.float()).all()
    full_size = math.ceil(roundings**0.5)
    assert largest_error(found, expected) <= tolerance(dtype, reduction, full_size)
    wide, truth = found.double().flatten(), expected.double().flatten()
    assert (wide - truth).norm() <= tolerance(dtype, reduction, full_size, units=1.0) * truth.norm()
