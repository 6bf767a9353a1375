"""Benchmark ``mfu``: the share of the machine that the ranking pass uses.

Model FLOPs utilisation = counted useful FLOPs / time / measured ceiling. The FLOPs are formulas that equal torch's
counter (``models.flops``); padding does not count. The ceiling is a packed product of 1,000 x 1,024 x 1,024 in the same
dtype with the same threads, in the same interleaved rounds: so the figure is a ratio of two times of one run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import interleaved, quantiles
from benchmarks.models.subject import Ceiling, Subject
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from kernels import wukong_layer
from kernels.roofline import counts
from models.execution import FusedNetwork, choose_execution
from models.execution_config import Execution
from models.flops import candidate_flops
from shared.clock import SystemClock

COUNTS = (100, 500, 1_000, 2_000)
QUICK_COUNTS = (1_000,)
NUM_ROUNDS, QUICK_ROUNDS, NUM_WARMUP = 15, 3, 2
LAYER = {"tokens": 32, "width": 64, "mixtures": 16, "hidden": 512, "layers": 6}
"""The fused layer alone, without attention to a history: 10.6 MFLOP a candidate."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure the whole ranking pass of the full tier, and the layer alone."""
    counts = QUICK_COUNTS if options.quick else COUNTS
    rounds = QUICK_ROUNDS if options.quick else NUM_ROUNDS
    subject = Subject.of(max(counts), options.seed)
    figures: list[Measurement] = []
    for execution, short in executions():
        work = ranking_passes(subject, execution, counts) | layer_passes(execution, options.seed)
        ceiling = Ceiling(_DTYPES[execution.precision])
        calls: dict[str, Callable[[], object]] = {name: call for name, (call, _) in work.items()}
        with torch.inference_mode():
            samples = interleaved({**calls, "ceiling": ceiling}, rounds, NUM_WARMUP, options.seed, SystemClock())
        params: dict[str, Param] = {
            "execution": f"{execution.backend} {execution.precision}",
            "threads": torch.get_num_threads(),
            "history": subject.config.encoder.num_events,
        }
        rate = quantiles(ceiling.flops / samples["ceiling"] / 1e6)
        figures.append(Measurement(f"ceiling_{short}_gflops", rate["p50"], "GFLOP/s", rate, rounds, params))
        for name, (_, flops) in work.items():
            share = (flops / samples[name]) / (ceiling.flops / samples["ceiling"])
            spread = quantiles(share)
            gflops = round(float(flops / quantiles(samples[name])["p50"] / 1e6), 1)
            figures.append(
                Measurement(
                    f"{name.format(short)}",
                    spread["p50"],
                    "1",
                    spread,
                    rounds,
                    {**params, "flops": flops, "gflops": gflops},
                )
            )
    return BenchmarkReport(tuple(figures), subject.config.digest())


def executions() -> list[tuple[Execution, str]]:
    """Return what is measured: what this machine would choose in bfloat16, and stock torch in float32."""
    found = []
    if (auto := choose_execution()).precision == "bfloat16":
        found.append((auto, "bf16"))
    return [*found, (choose_execution("torch", "float32"), "fp32")]


Work = dict[str, tuple[Callable[[], object], int]]
"""metric, with ``{}`` for the dtype -> call, and its useful FLOPs."""


def ranking_passes(subject: Subject, execution: Execution, counts: tuple[int, ...]) -> Work:
    """Return the ranking pass of the full tier: first pass and full pass of all candidates, the state being there."""
    network = FusedNetwork(subject.network, execution)
    config = subject.config
    with torch.inference_mode():
        state = network.encode(*subject.request)
    flops = sum(sum(candidate_flops(config, depth, subject.num_tokens).values()) for depth in (0, config.num_layers))

    def passes(number: int) -> object:
        pooled, counters, layout = subject.candidates(number)
        return network.full_pass(state, pooled, counters, None, None, layout)

    return {f"mfu_{{}}_n{number}": (partial(passes, number), number * flops) for number in counts}


def layer_passes(execution: Execution, seed: int, number: int = 1_000) -> Work:
    """Return the stack of interaction layers alone, in the shape of ``LAYER``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        made: Tensor = torch.randn(*shape, generator=generator) * float(shape[-1]) ** -0.5
        return made

    tokens, width, mixtures, hidden, depth = LAYER.values()
    half, products = tokens // 2, tokens * mixtures
    weights = [
        wukong_layer.LayerWeights(
            query_tokens=torch.zeros(0, tokens),
            query=random(width, width),
            attention_out=random(width, width),
            mixtures=random(mixtures, tokens),
            norm_products=torch.ones(products),
            up=random(hidden, products),
            down=random(half * width, hidden),
            linear=random(half, tokens),
            residual=None,
            norm=torch.ones(width),
            num_heads=1,
        )
        for _ in range(depth)
    ]
    given = [
        wukong_layer.LayerGiven(
            keys=torch.zeros(1, 0, width),
            values=torch.zeros(1, 0, width),
            queries=torch.zeros(1, 0, width),
            mixtures=random(1, mixtures, width),
            linear=random(1, half, width),
            hidden=random(1, hidden),
        )
        for _ in range(depth)
    ]
    dtype = _DTYPES[execution.precision]
    backend = execution.backend
    stack = wukong_layer.pack(weights, backend=backend, dtype=dtype)
    packed = wukong_layer.give(stack, given)
    x = torch.randn(number, tokens, width, generator=generator).to(dtype)
    sizes = counts.StackSizes(depth, tokens, width, mixtures, hidden, mlp_tokens=half, linear_tokens=half)
    flops = int(counts.wukong_stack(number, sizes).flops)
    return {f"mfu_layer_{{}}_n{number}": (partial(wukong_layer.rank, stack, x, packed), flops)}
