"""Benchmark ``kernels``: every operator against the plain form that it replaces, and what the search makes of each.

For each operator of ``kernels.search.spaces`` all variants are checked against the reference and timed in interleaved
rounds; rows give the plain form's time over the winner's, and the share of the roofline that the winner reaches under
a packed product and a copy of the same rounds (``roofs``). Block attention is measured against a packed product. The
number of operators that torch dispatches in one full pass is counted for the modules and for the packed stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import interleaved, measure
from benchmarks.kernels.block_attention import block_attention_rates
from benchmarks.kernels.roofs import Roofs, least_s
from benchmarks.models.subject import Subject
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from kernels.native import status
from kernels.roofline import counts
from kernels.search import Problem, SearchResult, search
from kernels.search.spaces import standard_problems
from kernels.segmented_topk import segmented_topk
from models.execution import FusedNetwork, choose_execution
from models.network import RankingNetwork
from shared.clock import SystemClock

NUM_ROUNDS, QUICK_ROUNDS = 21, 3
TOPK = {"values": 1_000_000, "k": 1_000}
NUM_CANDIDATES = 500


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Search every operator, and measure what has no search space."""
    rounds = QUICK_ROUNDS if options.quick else NUM_ROUNDS
    subject = Subject.of(NUM_CANDIDATES, options.seed)
    with torch.inference_mode():
        figures = [figure for problem in standard_problems() for figure in _searched(problem, rounds, options.seed)]
        figures += [
            *_topk(options.seed, rounds),
            *block_attention_rates(options.seed, rounds),
            *_dispatches(subject),
        ]
    return BenchmarkReport(tuple(figures), subject.config.digest())


def _searched(problem: Problem, rounds: int, seed: int) -> list[Measurement]:
    """Search one problem, with the roofs of its forms in the same rounds."""
    if problem.work is None:
        raise ValueError(f"work of {problem.op} must be counted, is not")
    precisions = {variant.name: variant.precision or problem.work.precision for variant in problem.variants}
    roofs = Roofs(problem.work.num_bytes, precisions.values())
    result = search(problem, num_rounds=rounds, seed=seed, beside=roofs.calls)
    taken_s = {name: time_us * 1e-6 for name, time_us in result.beside_us.items()}
    (winner_us,) = (each.time_us for each in result.outcomes if each.variant == result.winner and each.time_us)
    work = replace(problem.work, precision=precisions[result.winner])
    return _found(result, roofs.params(work, winner_us * 1e-6, taken_s))


def _found(result: SearchResult, reached: dict[str, Param]) -> list[Measurement]:
    """Return the plain form's time over the winner's, with every variant's time and fate as parameters."""
    times = {each.variant: each.time_us for each in result.outcomes if each.time_us is not None}
    plain = result.outcomes[0]
    params: dict[str, Param] = {
        **result.shape,
        "dtype": result.dtype,
        "threads": torch.get_num_threads(),
        "winner": result.winner,
        **reached,
        **{f"{each.variant}_us": each.time_us for each in result.outcomes if each.time_us is not None},
        **{f"{each.variant}_fate": each.fate for each in result.outcomes if each.time_us is None},
    }
    name = result.op if result.op != "linear" else f"linear_{'any' if 'int8_native' in times else 'bf16'}"
    if plain.time_us is None:
        return []
    return [Measurement(f"speedup_{name}", round(plain.time_us / times[result.winner], 3), "1", params=params)]


def _topk(seed: int, rounds: int) -> list[Measurement]:
    """Measure the k best of a million against torch's top-k and a full sort."""
    values = np.random.default_rng(seed).normal(size=TOPK["values"]).astype(np.float32)
    ends, tensor = np.array([0, len(values)]), torch.from_numpy(values)
    calls: dict[str, Callable[[], object]] = {
        "sort": lambda: np.argsort(-values, kind="stable")[: TOPK["k"]],
        "torch_topk": lambda: torch.topk(tensor, TOPK["k"]),
        "cpu": lambda: segmented_topk(values, ends, TOPK["k"], backend="cpu"),
    }
    if status().available:
        calls["native"] = lambda: segmented_topk(values, ends, TOPK["k"], backend="native")
    work = counts.segmented_topk((len(values),), TOPK["k"], with_tie_keys=False)
    roofs = Roofs(work.num_bytes, ())
    samples = interleaved({**calls, **roofs.calls}, rounds, 1, seed, SystemClock())
    median_s = {name: float(np.median(taken_ms)) * 1e-3 for name, taken_ms in samples.items()}
    best = min((name for name in samples if name in ("cpu", "native")), key=lambda name: median_s[name])
    reached = roofs.params(work, median_s[best], least_s(samples))
    return [
        measure(f"speedup_topk_over_{name}", samples[name] / samples[best], "p50", "1", **TOPK, backend=best, **reached)
        for name in ("sort", "torch_topk")
    ]


def _dispatches(subject: Subject) -> list[Measurement]:
    """Count the operators of one full pass: modules, and packed stack."""

    def count(network: RankingNetwork | FusedNetwork) -> int:
        state = network.encode(*subject.request)
        pooled, counters, layout = subject.candidates(NUM_CANDIDATES)
        network.full_pass(state, pooled, counters, None, None, layout)  # packs on first use
        with profile(activities=[ProfilerActivity.CPU]) as found:
            network.full_pass(state, pooled, counters, None, None, layout)
        return sum(event.cpu_parent is None for event in found.events() or [])

    execution = choose_execution()
    found = {"modules": count(subject.network), "packed": count(FusedNetwork(subject.network, execution))}
    params: dict[str, Param] = {"layers": subject.config.num_layers, "execution": execution.backend}
    return [Measurement(f"dispatched_ops_{name}", float(number), "1", params=params) for name, number in found.items()]
