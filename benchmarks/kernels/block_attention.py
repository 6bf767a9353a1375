"""Block attention of a long history: the share of a packed product's rate that its useful FLOPs reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness import interleaved, measure
from benchmarks.models.subject import Ceiling
from benchmarks.record import Measurement
from kernels.block_attention import Backend, block_attention
from kernels.native import status
from shared.clock import SystemClock

NUM_POSITIONS, BLOCK, WINDOW_BLOCKS = 2_048, 128, 2
HEADS = ((4, 64), (2, 128))
"""Heads and their width: 256 channels either way."""

NUM_WARMUP = 3


def block_attention_rates(seed: int, rounds: int) -> list[Measurement]:
    """Measure causal windows and whole ones. FLOPs are of pairs that are seen: packing and masking cost time alone."""
    backend: Backend = "native" if status().available else "torch"
    generator = torch.Generator().manual_seed(seed)
    offsets, window = torch.tensor([0, NUM_POSITIONS]), {"block": BLOCK, "window_blocks": WINDOW_BLOCKS}
    calls: dict[str, Callable[[], object]] = {}
    flops: dict[str, int] = {}
    for num_heads, width in HEADS:
        q, k, v = (torch.randn(NUM_POSITIONS, num_heads, width, generator=generator).bfloat16() for _ in range(3))
        for name, causal in (("causal", True), ("whole", False)):
            metric = f"block_attention_share_{name}_{num_heads}x{width}"
            calls[metric] = partial(
                block_attention,
                q,
                k,
                v,
                offsets,
                block=BLOCK,
                window_blocks=WINDOW_BLOCKS,
                causal=causal,
                backend=backend,
            )
            flops[metric] = 4 * num_heads * width * num_pairs(causal)
    ceiling = Ceiling(torch.bfloat16)
    samples = interleaved({**calls, "ceiling": ceiling}, rounds, NUM_WARMUP, seed, SystemClock())
    rate = ceiling.flops / samples["ceiling"]
    return [
        measure(
            metric,
            flops[metric] / samples[metric] / rate,
            "p50",
            "1",
            positions=NUM_POSITIONS,
            **window,
            backend=backend,
            threads=torch.get_num_threads(),
            gflops=round(float(flops[metric] / sorted(samples[metric])[rounds // 2] / 1e6), 1),
        )
        for metric in calls
    ]


def num_pairs(causal: bool) -> int:
    """Return how many pairs of positions see one another."""
    pairs = 0
    for block in range(NUM_POSITIONS // BLOCK):
        before = min(block, WINDOW_BLOCKS - 1) * BLOCK
        pairs += BLOCK * before + (BLOCK * (BLOCK + 1) // 2 if causal else BLOCK * BLOCK)
    return pairs
