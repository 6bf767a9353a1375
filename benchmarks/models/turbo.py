"""Benchmark ``turbo``: the three parts of Wukong Turbo, each on and off, on real data with several seeds.

* no bias: the same model trained with biases in every channel map and norm, and without;
* simplification: the trained model without the units that contribute least, made smaller and calibrated again;
* delegation: one training step of two workers with every parameter sharded, and with the small ones replicated.

Quality is the click NE of the full tier on the T1 test rows, with the history that a server knows. Trainings run one
thread each, as many at once as there are cores; throughput is measured afterwards, interleaved, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import interleaved, measure, quantiles
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RankerConfig
from models.flops import candidate_flops, request_flops
from models.network import RankingNetwork
from models.random_request import random_candidates, random_state
from models.simplify import num_parameters
from shared.clock import SystemClock
from shared.settings import load_settings
from training.config import TrainConfig, load_train_config
from training.data import load_dataset
from training.evaluate import evaluate
from training.loop import available_cores, train
from training.parallel.measure import measure_delegation
from training.simplify import simplify_model

TRAIN_CONFIG = Path("configs/train/quick.yaml")
NUM_SEEDS = 3
THRESHOLD = 0.01
"""Largest relative contribution of a unit that the simplified variant loses."""

QUICK_SHARE = 0.02
NUM_CANDIDATES = 500
NUM_ROUNDS, QUICK_ROUNDS = 40, 3
DELEGATION_THRESHOLDS = (0, 4_096)
TIER = "full"


@dataclass(frozen=True, slots=True)
class Trained:
    """What one training gave; travels between processes.

    Args:
        variant: ``bias``, ``no_bias`` or ``simplified``.
        seed: Of the training.
        click_ne: On the test rows.
        click_auc: On the test rows.
        config: The network's, which says its sizes.
        weights: State of the network.
    """

    variant: str
    seed: int
    click_ne: float
    click_auc: float
    config: RankerConfig
    weights: dict[str, torch.Tensor]

    def network(self) -> RankingNetwork:
        """Return the network again."""
        network = RankingNetwork(self.config)
        network.load_state_dict(self.weights)
        return network.requires_grad_(False).eval()


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train every variant with every seed, simplify, and measure."""
    config = load_train_config(TRAIN_CONFIG)
    if options.quick:
        config = config.model_copy(update={"train_share": QUICK_SHARE})
    seeds = range(options.seed, options.seed + (1 if options.quick else NUM_SEEDS))
    data_dir = load_settings().data_dir
    load_dataset(config.dataset, data_dir, synthetic_fallback=config.synthetic_fallback)  # fetched once, not by each
    jobs = [(config, bias, seed, data_dir) for bias in (False, True) for seed in seeds]
    with ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")) as pool:
        found = [each for made in pool.map(train_variant, jobs) for each in made]
    params: dict[str, Param] = {"seeds": len(seeds), "train_share": config.train_share, "dataset": config.dataset}
    figures = [
        *_quality(found, params),
        *_sizes(found, params),
        *_throughput(found, options.seed, QUICK_ROUNDS if options.quick else NUM_ROUNDS, params),
        *_delegation(found),
    ]
    return BenchmarkReport(tuple(figures), config.digest())


def train_variant(job: tuple[TrainConfig, bool, int, Path]) -> list[Trained]:
    """Train one variant with one seed, and simplify it where it has no bias.

    Args:
        job: The run, whether it has biases, the seed, and the folder of fetched data.
    """
    config, bias, seed, data_dir = job
    model = config.model.model_copy(update={"bias": bias})
    chosen = config.model_copy(update={"model": model, "seed": seed, "threads": 1})
    dataset = load_dataset(config.dataset, data_dir, synthetic_fallback=config.synthetic_fallback)
    trained = train(chosen, dataset)
    variants = {"bias" if bias else "no_bias": trained}
    if not bias:
        variants["simplified"], _ = simplify_model(trained, dataset, THRESHOLD, multiple=8)
    found = []
    for name, each in variants.items():
        click = evaluate(each, dataset, "test", "strict", TIER).objectives["click"]
        network = each.ranker.network
        found.append(Trained(name, seed, click.ne, click.auc, network.config, dict(network.state_dict())))
    return found


def _quality(found: Sequence[Trained], params: dict[str, Param]) -> list[Measurement]:
    figures = []
    for metric in ("click_ne", "click_auc"):
        for variant in dict.fromkeys(each.variant for each in found):
            values = [getattr(each, metric) for each in found if each.variant == variant]
            spread = quantiles(values)
            figures.append(
                Measurement(f"{metric}_{variant}", round(float(np.mean(values)), 5), "1", spread, len(values), params)
            )
    return figures


def _sizes(found: Sequence[Trained], params: dict[str, Param]) -> list[Measurement]:
    figures = []
    for variant in dict.fromkeys(each.variant for each in found):
        each = next(each for each in found if each.variant == variant)
        tokens = each.config.encoder.num_tokens
        sizes = {
            "parameters": (num_parameters(each.network()), "1"),
            "candidate_flops": (sum(candidate_flops(each.config, each.config.num_layers, tokens).values()), "FLOP"),
            "request_flops": (sum(request_flops(each.config, tokens).values()), "FLOP"),
        }
        figures += [
            Measurement(f"{name}_{variant}", float(value), unit, params=params) for name, (value, unit) in sizes.items()
        ]
    return figures


@torch.inference_mode()
def _throughput(found: Sequence[Trained], seed: int, rounds: int, params: dict[str, Param]) -> list[Measurement]:
    """Measure how long the full pass of 500 candidates takes in each variant, interleaved; request side apart."""
    calls = {}
    for variant in dict.fromkeys(each.variant for each in found):
        network = next(each for each in found if each.variant == variant).network()
        generator = torch.Generator().manual_seed(seed)
        state = random_state(network, generator)
        pooled, counters, layout = random_candidates(network.config, NUM_CANDIDATES, generator)
        calls[variant] = partial(network.full_pass, state, pooled, counters, None, None, layout)
    samples = interleaved(calls, rounds, 3, seed, SystemClock())
    figures = [
        measure(f"full_pass_ms_{name}", values, "p50", "ms", **params, candidates=NUM_CANDIDATES)
        for name, values in samples.items()
    ]
    for name in samples:
        if name != "no_bias":
            ratio = samples[name] / samples["no_bias"]
            figures.append(measure(f"time_ratio_{name}_over_no_bias", ratio, "p50", "1", **params))
    return figures


def _delegation(found: Sequence[Trained]) -> list[Measurement]:
    """Measure one step of two workers, with every parameter sharded and with small ones replicated."""
    config = next(each for each in found if each.variant == "no_bias").config
    num_rows = dict.fromkeys((table.name for table in config.tables), 1_000)
    figures = []
    for step in measure_delegation(config, num_rows, DELEGATION_THRESHOLDS):
        name = "delegated" if step.threshold else "sharded"
        params: dict[str, Param] = {
            "threshold": step.threshold,
            "replicated_elements": step.num_replicated,
            "sharded_elements": step.num_sharded,
            "error": step.error,
        }
        figures += [
            Measurement(f"collectives_{name}", float(step.num_collectives), "1", params=params),
            Measurement(f"collective_bytes_{name}", float(step.num_bytes), "B", params=params),
        ]
    return figures
