"""What a position sees, and how what it sees is weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kernels.backends import SCALE_LEAST, SCALE_MOST, check_number

Activation: TypeAlias = Literal["softmax", "silu"]

SIZE_MAX = 2**31
"""Largest block, and most blocks of a window: their product fits 64 bits."""


@dataclass(frozen=True, slots=True)
class Window:
    """The own block, and the whole blocks before it.

    Args:
        block: Positions of a block, 1 to 2^31; the last one of a sequence may be shorter.
        window_blocks: Blocks that a position sees, its own among them, 1 to 2^31.
        causal: Within its own block a position sees those up to itself; else the whole block.
        activation: ``softmax``, or ``silu``: the sum of silu(scale * q k) v, not normalised.
        scale: Factor of the scores, in [1e-30, 1e30].

    Raises:
        ValueError: a value is out of range.
    """

    block: int
    window_blocks: int
    causal: bool
    activation: Activation
    scale: float

    def __post_init__(self) -> None:
        for name, size in (("block", self.block), ("window_blocks", self.window_blocks)):
            if not 1 <= size <= SIZE_MAX or size % 1:
                raise ValueError(f"{name} must be a whole number in [1, {SIZE_MAX}], is {size}")
        if self.activation not in ("softmax", "silu"):
            raise ValueError(f"activation must be softmax or silu, is {self.activation!r}")
        check_number("scale", self.scale, SCALE_LEAST, SCALE_MOST)
