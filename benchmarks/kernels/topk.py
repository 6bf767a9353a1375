"""Benchmark ``topk``: the 1,000 best of 10,000 to 10,000,000 values, by selection and by sorting.

Both forms that a CPU has (numpy's partition, the native radix selection) against a full sort of the same values:
numpy's fast unstable sort (AVX-512 where the processor has it) and its stable argsort, which gives the order that
selection gives. ``exponent`` is the slope of log time over log size: 1 is linear. One thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.harness import interleaved, measure
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from kernels.native import status
from kernels.segmented_topk import segmented_topk
from shared.clock import SystemClock

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = (10_000, 100_000, 1_000_000)
K = 1_000
MAIN_SIZE = 1_000_000
NUM_ROUNDS = {10_000: 100, 100_000: 40, 1_000_000: 15, 10_000_000: 5}
QUICK_ROUNDS = 3


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure every size; variants of one size are interleaved."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = _figures(options)
    finally:
        torch.set_num_threads(threads)
    return BenchmarkReport(tuple(figures), "none")


def _figures(options: BenchmarkOptions) -> list[Measurement]:
    figures: list[Measurement] = []
    times: dict[str, list[float]] = {}
    sizes = QUICK_SIZES if options.quick else SIZES
    for size in sizes:
        rounds = QUICK_ROUNDS if options.quick else NUM_ROUNDS[size]
        samples = interleaved(_variants(size, options.seed), rounds, 1, options.seed, SystemClock())
        params: dict[str, Param] = {"values": size, "k": K, "threads": 1}
        for name, values in samples.items():
            times.setdefault(name, []).append(float(np.median(values)))
            figures.append(measure(f"{name}_ms_{size:.0e}".replace("+0", ""), values, "p50", "ms", **params))
        best = min((name for name in samples if name in ("numpy", "native")), key=lambda name: times[name][-1])
        for other in ("sort", "argsort"):
            metric = f"time_ratio_to_{other}_{size:.0e}".replace("+0", "")
            figures.append(measure(metric, samples[best] / samples[other], "p50", "1", **params, backend=best))
    logs = np.log(np.array(sizes))
    for name, each in times.items():
        slope = float(np.polyfit(logs, np.log(each), 1)[0])
        figures.append(Measurement(f"exponent_{name}", round(slope, 3), "1", params={"k": K, "sizes": len(sizes)}))
    return figures


def _variants(size: int, seed: int) -> dict[str, Callable[[], object]]:
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    ends = np.array([0, size], np.int64)
    calls: dict[str, Callable[[], object]] = {
        "sort": lambda: np.sort(values)[-K:],
        "argsort": lambda: np.argsort(-values, kind="stable")[:K],
        "numpy": lambda: segmented_topk(values, ends, K, backend="cpu"),
    }
    if status().available:
        calls["native"] = lambda: segmented_topk(values, ends, K, backend="native")
    return calls
