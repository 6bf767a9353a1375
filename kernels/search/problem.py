"""What is searched: a problem with its truth, and the variants that claim to solve it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from kernels.roofline import Precision, Work

Inputs: TypeAlias = tuple[Tensor, ...]
Solve: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]


class UnavailableVariantError(RuntimeError):
    """A variant does not exist on this machine or for this shape; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute.

    Args:
        name: Distinct within a problem, e.g. ``native-chunk48``.
        build: Returns the function that is checked and timed; packing of weights belongs here, not into the call. It
            raises ``UnavailableVariantError`` where this machine or shape has no such variant.
        schedule: What distinguishes it from others of its kind (chunk, threads, tile), for the evidence.
        precision: Of its products; None: as the problem's work.
    """

    name: str
    build: Callable[[], Solve]
    schedule: dict[str, int | str] = field(default_factory=dict)
    precision: Precision | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One operator at one shape.

    Args:
        op: Operator, e.g. ``broadcast_gemm``.
        shape: Sizes by name.
        dtype: Of the inputs, in words.
        inputs: seed -> inputs; each call makes new tensors.
        reference: The plain truth of these inputs, at least as exact as any variant.
        tolerance: Largest absolute error, derived from the dtype and the length of the sums.
        variants: What may solve it; the first is what runs without a search.
        work: FLOPs and bytes of one call, shared between candidates as far as that can be; None: nobody asks.

    Raises:
        ValueError: no variant, a name twice, or a tolerance that is not positive.
    """

    op: str
    shape: dict[str, int]
    dtype: str
    inputs: Callable[[int], Inputs]
    reference: Solve
    tolerance: float
    variants: Sequence[Variant]
    work: Work | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"variants must be distinct and at least one, are {names}")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be above 0, is {self.tolerance}")

    def key(self, device: str, versions: dict[str, str]) -> str:
        """Return the name of the answer to this very question: 16 hexadecimal digits.

        Args:
            device: The machine in words.
            versions: Whatever else may move a time or a result: libraries, and a digest of the kernels' own source.
        """
        asked = {
            "op": self.op,
            "shape": self.shape,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "variants": [[variant.name, variant.schedule] for variant in self.variants],
            "device": device,
            "versions": versions,
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
