"""Benchmark ``length``: NE of clicks by the number of events that the ranker may read of a user, on real data.

A model is trained with a history length drawn for each request, so that every length is one that it has learned from at
every step; then it is measured with its histories cut to each length, on the same test rows. A user with fewer events
than that has all of them, and a cut history hides how many there were. What else the model knows of a user (the user's
id, profile, time) stays; so length 0 is a ranker without history, not one without knowledge.

Three forms of the model are trained so. In ``alike`` all events that are read count alike in the surprises
(docs/encoder.md), in ``aged`` one that is ``HALF_DAYS`` old counts half; in both each event that is read is a token. In
``few_tokens`` surprises are aged, and only the newest ``TOKENS_MAX`` are tokens.

Requests of similar length share a batch, else each batch would be as wide as its longest history: they are sorted
within windows of ``WINDOW_BATCHES`` batches, and the batches of a window come in random order.

The fit is NE(L) = a L^-b over the lengths from 10 on, least squares in logarithms; the residual says how well it holds.
``change`` is that of the NE from the length before, with its standard error over users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

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
from training.loop import Trainer, available_cores
from training.metrics import Metrics
from training.model import TrainedModel

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

TRAIN_CONFIG = Path("configs/train/quick.yaml")
LENGTHS = (0, 10, 30, 100, 300, 1_000)
"""Drawn equally often: most histories are shorter than the longest, so it costs little more than the one before."""

HALF_DAYS, TOKENS_MAX = 30.0, 100
FORMS: Mapping[str, tuple[float | None, int]] = {
    "alike": (None, max(LENGTHS)),
    "aged": (HALF_DAYS, max(LENGTHS)),
    "few_tokens": (HALF_DAYS, TOKENS_MAX),
}
"""Form -> ``surprise_half_days`` and the encoder's ``num_events``."""

WINDOW_BATCHES = 8
TRAIN_SHARE, QUICK_SHARE = 0.3, 0.004
"""Of the training rows, the newest."""

REQUEST_EVERY, QUICK_EVERY = 10, 200
"""Every so many requests of the validation and test rows are scored."""

USERS = ((0, 100), (100, 300), (300, None))
"""Test rows are also measured apart, by how many events their user has: at least, fewer than."""

CHART = RESULTS_DIR / "length.svg"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one form said.

    Args:
        train_s: Time of the training.
        chances: Length -> float64 [N], calibrated click probabilities of the test rows.
    """

    train_s: float
    chances: dict[int, Floats]


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train the forms, each in a process of its own, measure them at every length, fit and draw."""
    config = load_train_config(TRAIN_CONFIG)
    share = QUICK_SHARE if options.quick else TRAIN_SHARE
    unspeculative = config.speculative.model_copy(update={"batch_share": 0.0})
    changes = {"seed": options.seed, "train_share": share, "speculative": unspeculative, "threads": 1}
    configs = []
    for half_days, num_events in FORMS.values():
        encoder = config.model.encoder.model_copy(update={"num_events": num_events})
        form = {"history_length": max(LENGTHS), "encoder": encoder, "surprise_half_days": half_days}
        configs.append(config.model_copy(update={**changes, "model": config.model.model_copy(update=form)}))
    every = QUICK_EVERY if options.quick else REQUEST_EVERY
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    with ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(partial(_outcome, every=every), configs))
    test = every_request(dataset.split.test, every)
    events = num_earlier(dataset, test)
    params: dict[str, Param] = {
        "dataset": dataset.name,
        "train_share": share,
        "test_rows": len(test),
        "mean_events": round(float(events.mean()), 1),
        "quick": options.quick,
    }
    measurements: list[Measurement] = []
    curves: dict[str, list[float]] = {}
    for form_name, outcome in zip(FORMS, outcomes, strict=True):
        half_days, num_events = FORMS[form_name]
        own: dict[str, Param] = {**params, "half_days": half_days or 0.0, "tokens_max": num_events}
        measurements.append(Measurement(f"train_s{suffix(form_name)}", round(outcome.train_s, 1), "s", params=own))
        measurements += figures(form_name, outcome.chances, test, events, own)
        curves[form_name] = [ne(outcome.chances[length], test) for length in LENGTHS if length]
    if not options.quick:
        draw([length for length in LENGTHS if length], curves)
    return BenchmarkReport(tuple(measurements), config.digest())


def figures(
    form: str, chances: Mapping[int, Floats], test: Rows, events: Ints, params: Mapping[str, Param]
) -> list[Measurement]:
    """Return the rows of one form: NE at each length, of all rows and by the number of the user's events; the fit."""
    rows: list[Measurement] = []
    before: int | None = None
    for length, chance in chances.items():
        own: dict[str, Param] = {**params, "auc": round(Metrics.of(chance, test.click, test.user_index).auc, 5)}
        own["share_of_rows_with_as_many"] = round(float((events >= length).mean()), 4)
        if before is not None:
            change, error = ne_change(chances[before], chance, test)
            own |= {"change": round(change, 5), "change_error": round(error, 5)}
        rows.append(Measurement(f"ne_{length}{suffix(form)}", round(ne(chance, test), 5), "1", {}, len(test), own))
        for low, high in USERS:
            chosen = (events >= low) & (events < (high or np.inf))
            if chosen.any():
                part = test.select(np.flatnonzero(chosen))
                name = f"ne_{length}{suffix(form)}_users_{low}_{high or 'on'}"
                rows.append(Measurement(name, round(ne(chance[chosen], part), 5), "1", {}, len(part), dict(params)))
        before = length
    fitted = [length for length in chances if length]
    scale, exponent, residual = power_law(fitted, [ne(chances[length], test) for length in fitted])
    fit: dict[str, Param] = {**params, "scale": round(scale, 5), "residual": round(residual, 5)}
    return [*rows, Measurement(f"power_law_exponent{suffix(form)}", round(exponent, 5), "1", params=fit)]


def suffix(form: str) -> str:
    """Return what follows the name of a metric: nothing for the form whose surprises are the served model's."""
    return "" if form == "alike" else f"_{form}"


def train_on_drawn_lengths(config: TrainConfig, dataset: Dataset, lengths: Sequence[int]) -> TrainedModel:
    """Train as ``training.loop.train`` does, each request with a history of a drawn length.

    Args:
        config: The run.
        dataset: The data.
        lengths: Each as likely as the others.
    """
    torch.set_num_threads(max(config.threads, 1))
    index = DatasetIndex.build(config.model, dataset)
    train = dataset.split.train
    rows = train.select(slice(len(train) - max(round(len(train) * config.train_share), 1), len(train)))
    random = np.random.default_rng(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        ranker = Ranker(config.model, index.num_rows, index.genres_by_row())
        reader = HistoryReader(dataset.log, max(*lengths, 1), "strict", align="right")
        trainer = Trainer(config, index, reader, ranker, len(rows))
    ranker.train()
    for part, drawn in drawn_batches(dataset, rows, lengths, config.batch_rows, random):
        for batch in request_batches(part, reader, len(part)):
            trainer.step(cut(batch, drawn))
    ranker.eval()
    return TrainedModel(ranker, index, Calibration.identity(config.model.depths))


def drawn_batches(
    dataset: Dataset, rows: Rows, lengths: Sequence[int], batch_rows: int, random: np.random.Generator
) -> Iterator[tuple[Rows, Ints]]:
    """Yield batches of whole requests of similar length, near to their order, and the length drawn for each request."""
    bounds = np.append(request_starts(rows), len(rows))
    drawn = random.choice(np.asarray(lengths, np.int64), size=len(bounds) - 1)
    found = np.minimum(num_earlier(dataset, rows)[bounds[:-1]], drawn)
    begin = 0
    while begin < len(found):
        limit = bounds[begin] + WINDOW_BATCHES * batch_rows
        end = max(int(np.searchsorted(bounds, limit, side="right")) - 1, begin + 1)
        order = begin + np.argsort(found[begin:end], kind="stable")
        # A new batch begins where the rows so far have filled one.
        ends = np.cumsum(np.diff(bounds)[order])
        batches = np.split(order, np.flatnonzero(np.diff(ends // batch_rows)) + 1)
        for number in random.permutation(len(batches)):
            requests = np.sort(batches[number])
            yield select_requests(rows, bounds, requests), drawn[requests]
        begin = end


def select_requests(rows: Rows, bounds: Ints, requests: Ints) -> Rows:
    """Return the rows of some requests, in their order; request i has the rows from bounds[i] to bounds[i + 1]."""
    return rows.select(np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in requests]))


def num_earlier(dataset: Dataset, rows: Rows) -> Ints:
    """Return how many events of strictly earlier seconds each row's user has."""
    log = dataset.log
    return np.asarray(log.second_start[rows.event_position] - log.user_offsets[rows.user_index], np.int64)


def cut(batch: RequestBatch, lengths: int | Ints) -> RequestBatch:
    """Return a batch whose histories are their newest ``lengths`` events, as if there had been no others.

    Args:
        batch: Histories aligned right.
        lengths: At least 0: one for all, or [R] of each request. The batch is as wide as the longest that is left.
    """
    history = batch.history
    found = np.minimum(history.lengths, lengths)
    full = history.item_ids.shape[1]
    width = int(found.max(initial=0))
    newest = slice(full - width, full)
    mask = np.arange(width) >= width - found[:, None]
    shortened = HistoryBatch(
        history.item_ids[:, newest] * mask,
        history.ratings[:, newest] * mask,
        history.timestamps_s[:, newest] * mask,
        history.surfaces[:, newest] * mask,
        mask,
        found,
        num_total=found,
    )
    return dataclasses.replace(batch, history=shortened)


def every_request(rows: Rows, every: int) -> Rows:
    """Return the rows of every ``every``-th request."""
    starts = request_starts(rows)
    number = np.zeros(len(rows), np.int64)
    number[starts] = 1
    return rows.select(np.flatnonzero((np.cumsum(number) - 1) % every == 0))


def by_length(dataset: Dataset, rows: Rows) -> tuple[Rows, Ints]:
    """Return the rows with their requests sorted by the length of their histories, and the place that each row had."""
    bounds = np.append(request_starts(rows), len(rows))
    order = np.argsort(num_earlier(dataset, rows)[bounds[:-1]], kind="stable")
    places = np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in order])
    return rows.select(places), places


def chances_at(model: TrainedModel, dataset: Dataset, valid: Rows, test: Rows, length: int) -> Floats:
    """Return the deepest exit's click probabilities of the test rows at one length, calibrated on validation rows."""
    depth = max(model.ranker.config.depths)
    calibration = fit_calibration({depth: logits_at(model, dataset, valid, length)}, valid)
    logits = calibration.apply(logits_at(model, dataset, test, length), depth)
    return np.asarray(probabilities(logits)[:, CLICK], np.float64)


@torch.inference_mode()
def logits_at(model: TrainedModel, dataset: Dataset, rows: Rows, length: int) -> npt.NDArray[np.float32]:
    """Return the logits of the deepest exit, float32 [N, O], with histories cut to a length."""
    ranker = model.ranker
    parts: list[npt.NDArray[np.float32]] = []
    reader = HistoryReader(dataset.log, max(length, 1), "strict", align="right")
    ordered, places = by_length(dataset, rows)
    for whole in request_batches(ordered, reader, 512):
        batch = cut(whole, length)
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        state = ranker.encode(RequestTensors.of(model.index.requests(batch)))
        candidates = model.index.candidates(batch.candidates, streaming=True)
        logits = ranker.network.full_pass(state, ranker.pool(candidates), candidates.counters, None, None, layout)
        parts.append(logits.numpy())
    found = np.concatenate(parts)
    logits_by_row = np.empty_like(found)
    logits_by_row[places] = found
    return logits_by_row


def ne(chance: Floats, rows: Rows) -> float:
    """Return the NE of clicks."""
    return Metrics.of(chance, rows.click, rows.user_index).ne


def ne_change(before: Floats, after: Floats, rows: Rows) -> tuple[float, float]:
    """Return by how much the NE changed, and the standard error of that over users, whose rows belong together."""
    labels = rows.click
    losses = [-np.where(labels, np.log(chance), np.log1p(-chance)) for chance in (before, after)]
    change = losses[1] - losses[0]
    entropy = Metrics.of(before, labels, rows.user_index).logloss / ne(before, rows)
    mean = float(change.mean())
    by_user = np.bincount(rows.user_index, weights=change - mean)
    return mean / entropy, float(np.sqrt((by_user**2).sum()) / len(labels) / entropy)


def power_law(lengths: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Fit value = scale * length ** -exponent; return scale, exponent and the RMS residual of ln(value)."""
    x, y = np.log(np.asarray(lengths, np.float64)), np.log(np.asarray(values, np.float64))
    slope, offset = np.polyfit(x, y, 1)
    residual = float(np.sqrt(np.mean((y - (slope * x + offset)) ** 2)))
    return float(np.exp(offset)), float(-slope), residual


def draw(lengths: Sequence[int], curves: Mapping[str, Sequence[float]], path: Path = CHART) -> None:
    """Draw NE over the logarithm of the length: each form measured and fitted."""
    lines: dict[str, list[float]] = {}
    for name, values in curves.items():
        scale, exponent, _ = power_law(lengths, values)
        lines[name] = list(values)
        lines[f"{name}, fitted"] = [scale * length**-exponent for length in lengths]
    xs = [float(np.log10(length)) for length in lengths]
    title = "NE of clicks by history length"
    path.write_text(line_chart(xs, lines, title, "log10 of the events read", "NE"), encoding="utf-8")


def _outcome(config: TrainConfig, every: int) -> Outcome:
    dataset = load_dataset(config.dataset, load_settings().data_dir, synthetic_fallback=config.synthetic_fallback)
    clock = SystemClock()
    begin_s = clock.monotonic_s()
    model = train_on_drawn_lengths(config, dataset, LENGTHS)
    train_s = clock.monotonic_s() - begin_s
    valid, test = (every_request(rows, every) for rows in (dataset.split.valid, dataset.split.test))
    return Outcome(train_s, {length: chances_at(model, dataset, valid, test, length) for length in LENGTHS})
