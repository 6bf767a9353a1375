"""Benchmark ``compskip``: NE of clicks with layers of the encoder that take turns, and with layers that do everything.

Both are trained with three seeds on the same rows in the same order and measured on the T1 test rows with the history
that a server knows; all else is equal. ``ne_change_relative`` is the mean over the seeds of the paired change from
everything to turns; its quantiles are those of the seeds. Cost is counted FLOPs of the encoder and of the whole request
side at the model's own history length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import quantiles
from benchmarks.models.predictions import load_or_train
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RankerConfig
from models.flops import request_flops
from models.heads import CLICK, probabilities
from shared.settings import load_settings
from training.config import TrainConfig, load_train_config
from training.data import Rows, load_dataset
from training.evaluate import Predictions, fit_calibration
from training.metrics import Metrics

TRAIN_CONFIG = Path("configs/train/quick.yaml")
NUM_SEEDS = 3
QUICK_SHARE = 0.02
FORMS = {"turns": True, "everything": False}
"""Form -> ``comp_skip`` of the encoder."""


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train or read both forms with each seed and compare.

    Raises:
        DataUnavailableError: the data cannot be had.
    """
    config = load_train_config(TRAIN_CONFIG)
    if options.quick:
        config = config.model_copy(update={"train_share": QUICK_SHARE})
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    seeds = range(options.seed, options.seed + (1 if options.quick else NUM_SEEDS))
    configs = [_with(config, seed, comp_skip) for comp_skip in FORMS.values() for seed in seeds]
    said, split = load_or_train(configs, dataset), dataset.split
    found = [_metrics(each, split.valid, split.test) for each in said]
    by_form = {name: found[number * len(seeds) :][: len(seeds)] for number, name in enumerate(FORMS)}
    models = {name: _with(config, options.seed, comp_skip).model for name, comp_skip in FORMS.items()}
    params: dict[str, Param] = {"seeds": len(seeds), "train_share": config.train_share, "dataset": config.dataset}
    return BenchmarkReport(tuple(figures(by_form, models, params)), config.digest())


def figures(
    found: Mapping[str, Sequence[Metrics]], models: Mapping[str, RankerConfig], params: Mapping[str, Param]
) -> list[Measurement]:
    """Return the rows of both forms' metrics, seed by seed in the same order."""
    rows: list[Measurement] = []
    for name, seeds in found.items():
        for metric in ("ne", "auc"):
            values = [getattr(each, metric) for each in seeds]
            rows.append(_mean(f"click_{metric}_{name}", values, params))
    changes = [turns.ne / every.ne - 1 for turns, every in zip(found["turns"], found["everything"], strict=True)]
    rows.append(_mean("ne_change_relative", changes, params))
    counted = {name: request_flops(each, each.encoder.num_tokens) for name, each in models.items()}
    encoder = {name: float(parts["encoder"]) for name, parts in counted.items()}
    request = {name: float(sum(parts.values())) for name, parts in counted.items()}
    for part, flops in (("encoder", encoder), ("request", request)):
        cut = round(1 - flops["turns"] / flops["everything"], 4)
        counts: dict[str, Param] = dict(flops.items())
        rows.append(Measurement(f"{part}_flops_cut", cut, "1", params={**params, **counts}))
    return rows


def _with(config: TrainConfig, seed: int, comp_skip: bool) -> TrainConfig:
    encoder = config.model.encoder.model_copy(update={"comp_skip": comp_skip})
    model = config.model.model_copy(update={"encoder": encoder})
    return config.model_copy(update={"model": model, "seed": seed})


def _metrics(said: Mapping[str, Predictions], valid: Rows, test: Rows) -> Metrics:
    """Return the click metrics of the deepest exit on the test rows, calibrated on the validation rows."""
    calibration, depth = fit_calibration(said["valid"], valid), max(said["test"])
    chance = probabilities(calibration.apply(said["test"][depth], depth))
    return Metrics.of(chance[:, CLICK], test.click, test.user_index)


def _mean(name: str, values: Sequence[float], params: Mapping[str, Param]) -> Measurement:
    return Measurement(name, round(float(np.mean(values)), 6), "1", quantiles(values), len(values), dict(params))
