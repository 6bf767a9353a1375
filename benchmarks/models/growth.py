"""Benchmark ``growth``: how activations grow over 16 layers with and without bias, before and after training.

What enters the norm of each layer is measured (``models.growth``), largest absolute value of all tokens: on fresh
networks with random inputs, and on networks trained on the newest twentieth of the T1 training rows, on test rows and
on the same random inputs. A growth is the last layer's figure over the first's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.record import Measurement
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.growth import LayerMaxima, activation_maxima, compare_growth, run_on_random_inputs
from models.layers.layout import CandidateLayout
from models.ranker import RequestTensors
from shared.settings import load_settings
from training.config import TrainConfig, load_train_config
from training.data import Dataset, HistoryReader, load_dataset, request_batches
from training.evaluate import evaluate
from training.loop import train
from training.model import TrainedModel

TRAIN_CONFIG = Path("configs/train/quick.yaml")
NUM_LAYERS, QUICK_LAYERS = 16, 3
TRAIN_SHARE, QUICK_SHARE = 0.05, 0.005
NUM_ROWS = 4_096
HELD_OUT_ROWS = 10_000
"""Validation and test rows: calibration and NE of 16 layers on all of them would take longer than the training."""

GROUPS = ("history", "request", "candidate")


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train both variants, one after the other, and measure fresh and trained networks.

    Raises:
        DataUnavailableError: the data cannot be had.
    """
    num_layers, share = (QUICK_LAYERS, QUICK_SHARE) if options.quick else (NUM_LAYERS, TRAIN_SHARE)
    config = load_train_config(TRAIN_CONFIG)
    deep = config.model.model_copy(update={"num_layers": num_layers})
    config = config.model_copy(update={"model": deep, "train_share": share, "seed": options.seed})
    figures = []
    for bias, layers in compare_growth(deep, num_layers, seed=options.seed).items():
        figures += _figures(f"growth_{num_layers}", bias, layers, {})
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    split = dataset.split
    valid, test = (rows.select(slice(0, HELD_OUT_ROWS)) for rows in (split.valid, split.test))
    dataset = replace(dataset, split=replace(split, valid=valid, test=test))
    for bias in (False, True):
        figures += _trained(config, dataset, bias)
    return BenchmarkReport(tuple(figures), config.digest())


def _trained(config: TrainConfig, dataset: Dataset, bias: bool) -> list[Measurement]:
    """Train one variant; measure it on test rows and on random inputs."""
    num_layers = config.model.num_layers
    chosen = config.model_copy(update={"model": config.model.model_copy(update={"bias": bias})})
    model = train(chosen, dataset)
    click_ne = evaluate(model, dataset, "test", "strict", "full").objectives["click"].ne
    noted: dict[str, float] = {"train_share": config.train_share, "click_ne": round(click_ne, 5)}
    with torch.inference_mode():
        with activation_maxima(model.ranker.network) as on_rows:
            _run_on_rows(model, dataset)
        with activation_maxima(model.ranker.network) as on_random:
            run_on_random_inputs(model.ranker.network, NUM_ROWS, config.seed)
    return [
        *_figures(f"trained_growth_{num_layers}", bias, on_rows, noted),
        *_figures(f"trained_growth_random_{num_layers}", bias, on_random, noted),
    ]


def _run_on_rows(model: TrainedModel, dataset: Dataset) -> None:
    rows = dataset.split.test.select(slice(0, NUM_ROWS))
    reader = HistoryReader(dataset.log, model.ranker.config.history_length, "strict", align="right")
    for batch in request_batches(rows, reader, NUM_ROWS):
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        candidates = model.index.candidates(batch.candidates, streaming=False)
        state = model.ranker.encode(RequestTensors.of(model.index.requests(batch)))
        model.ranker.network.all_depths(state, model.ranker.pool(candidates), candidates.counters, None, None, layout)


def _figures(metric: str, bias: bool, layers: Sequence[LayerMaxima], noted: dict[str, float]) -> list[Measurement]:
    figures = []
    for group in GROUPS:
        values = [getattr(layer, group) for layer in layers]
        params = {"first": round(values[0], 4), "last": round(values[-1], 4), "largest": round(max(values), 4), **noted}
        name = f"{metric}_{group}_{'bias' if bias else 'no_bias'}"
        figures.append(Measurement(name, round(values[-1] / values[0], 4), "1", params=params))
    return figures
