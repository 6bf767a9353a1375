"""Benchmark ``length``: NE of clicks by the number of events that the ranker may read of a user, on real data.

One model is trained with a history length drawn for each batch, so that every length is one that it has learned from;
then it is measured with its histories cut to each length, on the same test rows. A row with fewer events than that has
all of them, and a cut history hides how many there were. What else the model knows of a user (the user's id, profile,
time) stays; so length 0 is a ranker without history, not one without knowledge.

The fit is NE(L) = a L^-b over the lengths from 10 on, least squares in logarithms; the residual says how well it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.record import RESULTS_DIR, Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.calibration import Calibration
from models.heads import CLICK, probabilities
from models.layers.layout import CandidateLayout
from models.ranker import Ranker, RequestTensors
from shared.clock import SystemClock
from shared.settings import load_settings
from training.chart import line_chart
from training.config import TrainConfig, load_train_config
from training.data import Dataset, HistoryBatch, HistoryReader, Rows, load_dataset, request_batches
from training.data.batches import RequestBatch, request_starts
from training.evaluate import fit_calibration
from training.indexing import DatasetIndex
from training.loop import Trainer
from training.metrics import Metrics
from training.model import TrainedModel

TRAIN_CONFIG = Path("configs/train/quick.yaml")
LENGTHS = (0, 10, 30, 100, 300, 1_000)
DRAWS = (0.15, 0.2, 0.2, 0.2, 0.15, 0.1)
"""How often each length is drawn for a batch; a batch of the longest costs as much as ten of 100."""

TRAIN_SHARE, QUICK_SHARE = 0.1, 0.004
"""Of the training rows, the newest: a tenth trains in minutes on one core."""

REQUEST_EVERY, QUICK_EVERY = 10, 200
"""Every so many requests of the validation and test rows are scored."""

CHART = RESULTS_DIR / "length.svg"


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train once, measure at every length, fit and draw."""
    config = load_train_config(TRAIN_CONFIG)
    longest = max(LENGTHS)
    encoder = config.model.encoder.model_copy(update={"num_events": longest})
    model_config = config.model.model_copy(update={"history_length": longest, "encoder": encoder})
    share = QUICK_SHARE if options.quick else TRAIN_SHARE
    unspeculative = config.speculative.model_copy(update={"batch_share": 0.0})
    changes = {"model": model_config, "seed": options.seed, "train_share": share, "speculative": unspeculative}
    config = config.model_copy(update=changes)
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    clock = SystemClock()
    begin_s = clock.monotonic_s()
    model = train_on_drawn_lengths(config, dataset, LENGTHS)
    train_s = clock.monotonic_s() - begin_s
    every = QUICK_EVERY if options.quick else REQUEST_EVERY
    valid, test = (every_request(rows, every) for rows in (dataset.split.valid, dataset.split.test))
    earlier = dataset.log.second_start[test.event_position] - dataset.log.user_offsets[test.user_index]
    params: dict[str, Param] = {
        "dataset": dataset.name,
        "train_share": share,
        "test_rows": len(test),
        "mean_events": round(float(earlier.mean()), 1),
        "quick": options.quick,
    }
    found: dict[int, float] = {}
    measurements = [Measurement("train_s", round(train_s, 1), "s", params=params)]
    for length in LENGTHS:
        metrics = quality_at(model, dataset, valid, test, length)
        found[length] = metrics.ne
        affected = round(float((earlier >= length).mean()), 4)
        of_length: dict[str, Param] = {**params, "auc": round(metrics.auc, 5), "share_of_rows_with_as_many": affected}
        measurements.append(Measurement(f"ne_{length}", round(metrics.ne, 5), "1", {}, len(test), of_length))
    fitted = [length for length in LENGTHS if length]
    scale, exponent, residual = power_law(fitted, [found[length] for length in fitted])
    fit: dict[str, Param] = {**params, "scale": round(scale, 5), "residual": round(residual, 5)}
    measurements.append(Measurement("power_law_exponent", round(exponent, 5), "1", params=fit))
    if not options.quick:
        draw(fitted, [found[length] for length in fitted], scale, exponent)
    return BenchmarkReport(tuple(measurements), config.digest())


def train_on_drawn_lengths(config: TrainConfig, dataset: Dataset, lengths: Sequence[int]) -> TrainedModel:
    """Train as ``training.loop.train`` does, each batch with histories of a drawn length.

    Args:
        config: The run.
        dataset: The data.
        lengths: Drawn as ``DRAWS`` says.
    """
    torch.set_num_threads(max(config.threads, 1))
    index = DatasetIndex.build(config.model, dataset)
    train = dataset.split.train
    rows = train.select(slice(len(train) - max(round(len(train) * config.train_share), 1), len(train)))
    random = np.random.default_rng(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        ranker = Ranker(config.model, index.num_rows, index.genres_by_row())
        reader = HistoryReader(dataset.log, max(lengths), "strict", align="right")
        trainer = Trainer(config, index, reader, ranker, len(rows))
    ranker.train()
    for batch in request_batches(rows, reader, config.batch_rows):
        trainer.step(cut(batch, int(random.choice(lengths, p=DRAWS))))
    ranker.eval()
    return TrainedModel(ranker, index, Calibration.identity(config.model.depths))


def cut(batch: RequestBatch, length: int) -> RequestBatch:
    """Return a batch whose histories are their newest ``length`` events, as if there had been no others.

    Args:
        batch: Histories aligned right.
        length: At least 0.
    """
    history = batch.history
    width = history.item_ids.shape[1]
    newest = slice(max(width - length, 0), width)
    lengths = np.minimum(history.lengths, length)
    shortened = HistoryBatch(
        history.item_ids[:, newest],
        history.ratings[:, newest],
        history.timestamps_s[:, newest],
        history.surfaces[:, newest],
        history.mask[:, newest],
        lengths,
        num_total=lengths,
    )
    return dataclasses.replace(batch, history=shortened)


def every_request(rows: Rows, every: int) -> Rows:
    """Return the rows of every ``every``-th request."""
    starts = request_starts(rows)
    number = np.zeros(len(rows), np.int64)
    number[starts] = 1
    return rows.select(np.flatnonzero((np.cumsum(number) - 1) % every == 0))


def quality_at(model: TrainedModel, dataset: Dataset, valid: Rows, test: Rows, length: int) -> Metrics:
    """Return the click quality of the deepest exit at one length, calibrated on the validation rows at that length."""
    depth = max(model.ranker.config.depths)
    calibration = fit_calibration({depth: logits_at(model, dataset, valid, length)}, valid)
    logits = calibration.apply(logits_at(model, dataset, test, length), depth)
    return Metrics.of(probabilities(logits)[:, CLICK], test.click, test.user_index)


@torch.inference_mode()
def logits_at(model: TrainedModel, dataset: Dataset, rows: Rows, length: int) -> npt.NDArray[np.float32]:
    """Return the logits of the deepest exit, float32 [N, O], with histories cut to a length."""
    ranker = model.ranker
    parts: list[npt.NDArray[np.float32]] = []
    reader = HistoryReader(dataset.log, max(length, 1), "strict", align="right")
    for whole in request_batches(rows, reader, 1_024):
        batch = cut(whole, length)
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        state = ranker.encode(RequestTensors.of(model.index.requests(batch)))
        candidates = model.index.candidates(batch.candidates, streaming=True)
        logits = ranker.network.full_pass(state, ranker.pool(candidates), candidates.counters, None, None, layout)
        parts.append(logits.numpy())
    return np.concatenate(parts)


def power_law(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Fit value = scale * length ** -exponent; return scale, exponent and the RMS residual of ln(value)."""
    x, y = np.log(np.asarray(lengths, np.float64)), np.log(np.asarray(values, np.float64))
    slope, offset = np.polyfit(x, y, 1)
    residual = float(np.sqrt(np.mean((y - (slope * x + offset)) ** 2)))
    return float(np.exp(offset)), float(-slope), residual


def draw(lengths: Sequence[int], values: Sequence[float], scale: float, exponent: float, path: Path = CHART) -> None:
    """Draw NE over the logarithm of the length, measured and fitted."""
    lines = {"measured": list(values), "fitted": [scale * length**-exponent for length in lengths]}
    xs = [float(np.log10(length)) for length in lengths]
    title = "NE of clicks by history length"
    path.write_text(line_chart(xs, lines, title, "log10 of the events read", "NE"), encoding="utf-8")
