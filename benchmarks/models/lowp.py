"""Benchmark ``lowp``: what selective low precision buys on this machine, and what it costs.

The precision plan of the newest published weights (``rankmesh quantize``): time of the whole full pass by plan over
that of the fastest form with all layers in bfloat16, of the modules in float32, and of what a replica of this machine
runs without a plan; and the relative change of NE on held-out rows. Where that form is the fastest already, no plan
pays: then it is empty and says so. Beside it one large layer, where int8 can show what it is worth.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from kernels.search import search
from kernels.search.spaces import INT8_ERROR, linear_problem
from models.quantize.plan import PrecisionPlan
from shared.errors import DataUnavailableError
from shared.settings import load_settings
from shared.weights import WeightStore
from training.quantize import NE_BUDGET, quantize_version

LAYER = (1_000, 1_024, 1_024)
NUM_ROUNDS, QUICK_ROUNDS = 41, 3


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Make a plan for the newest weights, and time a large layer in every format.

    Raises:
        DataUnavailableError: nothing is published.
    """
    settings = load_settings()
    var = settings.var_dir.absolute()
    store = WeightStore(str(var / "weights"))
    if not (versions := store.versions()):
        raise DataUnavailableError("no weights are published: rankmesh train", field="weights", value=str(var))
    console = Console(file=io.StringIO())  # the rows say it
    with tempfile.TemporaryDirectory() as folder:  # a benchmark must not decide what a mesh runs
        plan = quantize_version(store, versions[-1], settings.data_dir, Path(folder), NE_BUDGET, console, console)
    counts: dict[str, int] = {}
    for number_format in plan.layers.values():
        counts[number_format] = counts.get(number_format, 0) + 1
    params: dict[str, Param] = {
        "weights": plan.version,
        "layers": len(plan.evidence),
        **{f"layers_{name}": number for name, number in counts.items()},
        "rolled_back": len(plan.rolled_back),
        "pays": bool(plan.layers),
        "without_plan": plan.without_plan,
        **{f"{name}_ms": round(value * 1e3, 3) for name, value in plan.pass_seconds.items()},
        "ne_budget": plan.ne_budget,
    }
    seconds = plan.pass_seconds
    # An empty plan changes nothing: what runs is what runs without one.
    taken = seconds["plan"] if plan.layers else seconds[plan.without_plan]
    rivals = {"fp32": seconds["fp32"], "without": seconds[plan.without_plan]}
    if forms := [seconds[name] for name in seconds if name in ("bf16", "torch_bfloat16", "native_bfloat16")]:
        rivals["bf16"] = min(forms)
    figures = [
        Measurement(f"time_ratio_plan_over_{name}", round(taken / rival_s, 4), "1", params=params)
        for name, rival_s in rivals.items()
    ]
    figures += [
        Measurement("ne_change_relative", _change(plan), "1", params=params),
        Measurement("score_error_max", plan.score_error_max, "1", params=params),
    ]
    return BenchmarkReport((*figures, *_large_layer(options)), plan.shapes)


def _change(plan: PrecisionPlan) -> float:
    """Return what low precision costs in what runs: the plan's choice, or the form that runs without one."""
    return plan.ne_change if plan.layers else plan.stack_ne_changes.get(plan.without_plan, 0.0)


def _large_layer(options: BenchmarkOptions) -> list[Measurement]:
    with torch.inference_mode():
        rounds = QUICK_ROUNDS if options.quick else NUM_ROUNDS
        result = search(linear_problem(*LAYER, INT8_ERROR), num_rounds=rounds, seed=options.seed)
    times = {each.variant: each.time_us for each in result.outcomes if each.time_us is not None}
    params: dict[str, Param] = {
        "rows": LAYER[0], "inputs": LAYER[1], "outputs": LAYER[2], "threads": torch.get_num_threads(),
        **{f"{name}_us": time_us for name, time_us in times.items()},
        **{f"{each.variant}_error": each.error for each in result.outcomes if each.error is not None},
    }  # fmt: skip
    return [
        Measurement(f"speedup_{name}_over_bf16", round(times["packed_bf16"] / times[name], 3), "1", params=params)
        for name in ("int8_native", "int8_torch")
        if name in times
    ]
