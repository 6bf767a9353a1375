"""The pairs that the FLOPs of block attention are counted of."""

from __future__ import annotations

import pytest

from benchmarks.kernels.block_attention import BLOCK, NUM_POSITIONS, WINDOW_BLOCKS, num_pairs
from kernels.block_attention.reference import visible
from kernels.block_attention.window import Window


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_that_the_reference_sees(causal: bool) -> None:
    window = Window(BLOCK, WINDOW_BLOCKS, causal, "softmax", 1.0)
    assert num_pairs(causal) == int(visible(NUM_POSITIONS, window).sum())
