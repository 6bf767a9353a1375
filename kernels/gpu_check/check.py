"""Check and its parts: what is run, what it must give, what it asks of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.roofline import Work


@dataclass(frozen=True, slots=True)
class Prepared:
    """One kernel with its inputs on the device.

    Args:
        fused: Runs the Triton form.
        unfused: Runs the plain torch form of the same work, materialised where the kernel is not.
        expected: Returns the answer in float64, and by element the magnitude of the terms that were summed.
        tolerance: Largest error allowed, relative to that magnitude.
    """

    fused: Callable[[], Tensor]
    unfused: Callable[[], Tensor]
    expected: Callable[[], tuple[Tensor, Tensor]]
    tolerance: float


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel at one shape.

    Args:
        op: The operator's folder.
        shape: What distinguishes the check within the operator; also its name in the table.
        make: Builds the inputs on a device.
        is_timed: Timed after it was found right; small odd shapes are not.
        work: FLOPs and bytes of one call.
    """

    op: str
    shape: str
    make: Callable[[torch.device], Prepared]
    is_timed: bool
    work: Work

    @property
    def name(self) -> str:
        """Operator and shape."""
        return f"{self.op} {self.shape}"
