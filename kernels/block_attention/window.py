"""What a position sees, and how what it sees is weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["softmax", "silu"]


@dataclass(frozen=True, slots=True)
class Window:
    """The own block, and the whole blocks before it.

    Args:
        block: Positions of a block, at least 1; the last one of a sequence may be shorter.
        window_blocks: Blocks that a position sees, its own among them, at least 1.
        causal: Within its own block a position sees those up to itself; else the whole block.
        activation: ``softmax``, or ``silu``: the sum of silu(scale * q k) v, not normalised.
        scale: Factor of the scores, positive and finite.

    Raises:
        ValueError: a value is out of range.
    """

    block: int
    window_blocks: int
    causal: bool
    activation: Activation
    scale: float

    def __post_init__(self) -> None:
        if self.block < 1 or self.window_blocks < 1:
            raise ValueError(f"block and window_blocks must be at least 1, are {self.block} and {self.window_blocks}")
        if self.activation not in ("softmax", "silu"):
            raise ValueError(f"activation must be softmax or silu, is {self.activation!r}")
        if not 0.0 < self.scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, is {self.scale}")
