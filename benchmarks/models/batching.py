"""Benchmark ``batching``: requests ranked together in one pass, against one after the other.

Says whether a ranking station of this machine should wait for company. Requests of distinct users with full histories,
both passes of the tier ``full``, the model of ``configs/model/small.yaml``; one thread, as a station of the local
deployment has. ``time_ratio_n<C>_r<R>``: R requests of C candidates in one pass, over R passes of one; the waiting that
company costs is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import interleaved, measure
from benchmarks.record import Measurement
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RankerConfig
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.random_request import random_candidates, random_state
from shared.clock import SystemClock
from shared.config import load_config

SMALL = Path("configs/model/small.yaml")
SIZES = (20, 100, 500)
TOGETHER = (2, 4, 8)
NUM_ROUNDS, NUM_WARMUP = 20, 2
QUICK_ROUNDS, QUICK_WARMUP = 2, 1


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure each number of candidates with each number of requests, both sides interleaved."""
    config = load_config(RankerConfig, SMALL, {})
    rounds, warmup = (QUICK_ROUNDS, QUICK_WARMUP) if options.quick else (NUM_ROUNDS, NUM_WARMUP)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [
            _figure(config, size, together, options.seed, rounds, warmup) for size in SIZES for together in TOGETHER
        ]
    finally:
        torch.set_num_threads(threads)
    return BenchmarkReport(tuple(figures), config.digest())


def _figure(config: RankerConfig, size: int, together: int, seed: int, rounds: int, warmup: int) -> Measurement:
    with torch.inference_mode():
        variants = _variants(config, size, together, seed)
        samples = interleaved(variants, rounds, warmup, seed, SystemClock())
    ratio = samples["together"] / samples["alone"]
    metric = f"time_ratio_n{size}_r{together}"
    return measure(metric, ratio, "p50", "1", candidates=size, requests=together, threads=1, tier="full")


def _variants(config: RankerConfig, size: int, together: int, seed: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RankingNetwork(config).requires_grad_(False).eval()
    depth = config.depth("full")
    states = [random_state(network, generator) for _ in range(together)]
    parts = [random_candidates(config, size, generator) for _ in range(together)]
    stacked = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    pooled = torch.cat([pooled for pooled, _, _ in parts])
    counters = torch.cat([counters for _, counters, _ in parts])
    layout = CandidateLayout.of(torch.repeat_interleave(torch.arange(together), size), together)

    def alone() -> None:
        for state, (own, counted, one) in zip(states, parts, strict=True):
            network.full_pass(state, own, counted, None, None, one, depth)

    def at_once() -> None:
        network.full_pass(stacked, pooled, counters, None, None, layout, depth)

    return {"alone": alone, "together": at_once}
