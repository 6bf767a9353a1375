"""Block attention of a long history: the share of a packed product's rate that its useful FLOPs reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.harness import interleaved, measure
from benchmarks.kernels.roofs import Roofs, least_s
from benchmarks.record import Measurement
from kernels.block_attention import Backend, block_attention
from kernels.native import status
from kernels.roofline import Work, counts
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
    works: dict[str, Work] = {}
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
            works[metric] = counts.block_attention(
                (NUM_POSITIONS,), num_heads, width, block=BLOCK, window_blocks=WINDOW_BLOCKS, causal=causal
            )
    (num_bytes,) = {work.num_bytes for work in works.values()}
    roofs = Roofs(num_bytes, ["bf16"])
    samples = interleaved({**calls, **roofs.calls}, rounds, NUM_WARMUP, seed, SystemClock())
    roofs_s = least_s(samples)
    rate = roofs.rate("bf16", samples["roof_bf16"])
    return [
        measure(
            metric,
            works[metric].flops / samples[metric] / rate,
            "p50",
            "1",
            positions=NUM_POSITIONS,
            **window,
            backend=backend,
            threads=torch.get_num_threads(),
            **roofs.params(works[metric], float(np.median(samples[metric])) * 1e-3, roofs_s),
        )
        for metric in calls
    ]
