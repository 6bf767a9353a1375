"""One pass over the training rows in time order, request by request, and the calibration after it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from models.calibration import Calibration
from models.config import OBJECTIVES
from models.embedding.vocabulary import OOV_ROW
from models.heads import CLICK, CONVERSION
from models.layers.layout import CandidateLayout
from models.ranker import CandidateTensors, Ranker, RequestTensors
from shared.clock import Clock, SystemClock
from shared.weights import WeightStore
from training.config import TrainConfig, load_train_config
from training.data import (
    Dataset,
    HistoryReader,
    RequestBatch,
    Rows,
    StoredHistories,
    load_dataset,
    request_batches,
    stored_histories,
)
from training.evaluate import evaluate_all, show_evaluations
from training.indexing import DatasetIndex
from training.model import TrainedModel
from training.progress import RichProgress, StepReport, TrainProgress
from training.publish import publish
from training.routing import fit_on_held_out
from training.speculative import CacheAnswer, cache_answer, stale_batch


class Trainer:
    """Learns from batches, in the order in which they are given.

    Args:
        config: The run.
        index: Table rows of the data set.
        reader: Joins the histories of the batches.
        ranker: What is trained.
        rows_total: Rows of the run, for the learning-rate schedule.
    """

    def __init__(
        self, config: TrainConfig, index: DatasetIndex, reader: HistoryReader, ranker: Ranker, rows_total: int
    ) -> None:
        self._config = config
        self._index = index
        self._reader = reader
        self._ranker = ranker
        self._rows_total = rows_total
        self._rows_done = 0
        self._steps = 0
        self._random = np.random.default_rng(config.seed)
        # Reads the speculative embedding linearly; gives that head its gradient and is not published.
        self._probe = nn.Linear(config.model.speculative_width, len(OBJECTIVES), bias=False)
        self._network = [*ranker.network.parameters(), *self._probe.parameters()]
        candidate = ranker.network.candidate_parameters()
        theirs = {id(parameter) for parameter in candidate}
        rest = [parameter for parameter in self._network if id(parameter) not in theirs]
        rate = config.optimizer.network_rate
        self._peaks = (rate, rate * config.optimizer.candidate_share, config.optimizer.table_rate)
        groups = (rest, candidate, list(ranker.tables.parameters()))
        self._optimizer = torch.optim.Adam([{"params": group} for group in groups], lr=rate, fused=True)
        self._user_column = [feature.name for feature in config.model.request_features].index("user_id")

    def step(self, batch: RequestBatch) -> StepReport:
        """Learn from one batch."""
        self._schedule()
        answer = self._cache_answer(batch) if self._draw() < self._config.speculative.batch_share else None
        requests, candidates = self._inputs(batch, hide=True)
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        network = self._ranker.network
        state = self._ranker.encode(requests)
        pooled = self._ranker.pool(candidates)
        vectors = None if answer is None else torch.from_numpy(answer.vectors)
        levels = None if answer is None else torch.from_numpy(answer.levels)
        logits, embedding = network.all_depths(state, pooled, candidates.counters, vectors, levels, layout)
        labels = _labels(batch.candidates)
        first, *inner, deepest = logits.values()
        click, conversion = _losses(deepest, labels)
        weights = self._config.loss
        loss = click + weights.conversion * conversion
        for share, other in (
            *((weights.inner_exits, each) for each in inner),
            (weights.first_pass, first),
            (weights.speculative, self._probe(embedding)),
        ):
            other_click, other_conversion = _losses(other, labels)
            loss = loss + share * (other_click + weights.conversion * other_conversion)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._network, self._config.optimizer.gradient_norm_max)
        self._optimizer.step()
        self._rows_done += batch.num_candidates
        self._steps += 1
        return StepReport(self._rows_done, self._rows_total, float(click.detach()), float(labels[:, CLICK].mean()))

    def _draw(self) -> float:
        return float(self._random.random())

    def _schedule(self) -> None:
        settings = self._config.optimizer
        rise = min((self._steps + 1) / max(settings.warmup_steps, 1), 1.0)
        fall = 1.0 - (1.0 - settings.final_share) * self._rows_done / max(self._rows_total, 1)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * rise * fall

    def _inputs(self, batch: RequestBatch, hide: bool) -> tuple[RequestTensors, CandidateTensors]:
        inputs = self._index.requests(batch)
        candidates = self._index.candidates(batch.candidates, streaming=True)
        if hide:
            shares, random = self._config.dropout, self._random
            inputs.feature_rows[random.random(batch.num_requests) < shares.user, self._user_column] = OOV_ROW
            inputs.item_rows[random.random(inputs.item_rows.shape) < shares.item] = OOV_ROW
            candidates.item_rows[torch.from_numpy(random.random(batch.num_candidates) < shares.item)] = OOV_ROW
        return RequestTensors.of(inputs), candidates

    @torch.no_grad()
    def _cache_answer(self, batch: RequestBatch) -> CacheAnswer:
        stale = stale_batch(batch, self._reader, self._config.speculative.stale_events_max, self._random)
        requests, candidates = self._inputs(stale, hide=False)
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        state, pooled = self._ranker.encode(requests), self._ranker.pool(candidates)
        embedding = self._ranker.network.embed(state, pooled, candidates.counters, layout)
        groups = self._index.groups(batch.candidates.item_id)
        return cache_answer(embedding.numpy(), batch, groups, self._config.speculative, self._random)


def train(config: TrainConfig, dataset: Dataset, progress: TrainProgress | None = None) -> TrainedModel:
    """Train on the training rows of a data set, and fit calibration and gain model on its validation rows.

    Args:
        config: The run.
        dataset: The data.
        progress: Is told of every step.

    Raises:
        StoreUnavailableError: ``config.histories`` names a store that is out of reach.
    """
    with stored_histories(config.histories, dataset) as histories:
        return _train(config, dataset, progress, histories)


def _train(
    config: TrainConfig, dataset: Dataset, progress: TrainProgress | None, histories: StoredHistories | None
) -> TrainedModel:
    torch.set_num_threads(config.threads or available_cores())
    index = DatasetIndex.build(config.model, dataset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        ranker = Ranker(config.model, index.num_rows, index.genres_by_row())
        rows = _newest(dataset.split.train, config.train_share)
        reader = HistoryReader(dataset.log, config.model.history_length, "strict", align="right", histories=histories)
        trainer = Trainer(config, index, reader, ranker, len(rows))
    ranker.train()
    for batch in request_batches(rows, reader, config.batch_rows):
        report = trainer.step(batch)
        if progress is not None:
            progress.step(report)
    ranker.eval()
    model = TrainedModel(ranker, index, Calibration.identity(config.model.depths))
    return fit_on_held_out(model, dataset)


def train_and_publish(
    train_config_path: Path, data_dir: Path, store_url: str, console: Console, clock: Clock | None = None
) -> str:
    """Load the data, train with a progress bar, measure, show and publish.

    Args:
        train_config_path: YAML of a ``TrainConfig``.
        data_dir: Folder of fetched data.
        store_url: Weight store.
        console: Where progress and quality are shown.
        clock: Measures the run.

    Returns:
        The published version.

    Raises:
        ConfigError: the configuration cannot be used.
        DataUnavailableError: there are no data.
        WeightsError: the store refuses the version.
    """
    clock = clock or SystemClock()
    config = load_train_config(train_config_path)
    dataset = load_dataset(
        config.dataset,
        data_dir,
        seed=config.seed,
        synthetic=config.synthetic,
        synthetic_fallback=config.synthetic_fallback,
    )
    console.print(f"[bold]{config.name}[/bold]: {dataset.provenance}; {len(dataset.split.train):,} training rows")
    begin_s = clock.monotonic_s()
    with RichProgress(console, clock) as progress:
        model = train(config, dataset, progress)
    train_s = clock.monotonic_s() - begin_s
    evaluations = evaluate_all(model, dataset)
    show_evaluations(evaluations, console, f"{config.name}: {dataset.name}, trained in {train_s:.0f} s")
    version = publish(model, config, dataset, evaluations, WeightStore(store_url), train_s)
    console.print(f"published weights [bold]{version}[/bold]")
    return version


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _newest(rows: Rows, share: float) -> Rows:
    return rows.select(slice(len(rows) - max(round(len(rows) * share), min(len(rows), 1)), len(rows)))


def _labels(rows: Rows) -> Tensor:
    """Return click and conversion as floats: [C, O]."""
    return torch.from_numpy(np.stack([rows.click, rows.conversion], axis=1).astype(np.float32))


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log likelihoods of clicks, and of conversions of clicked rows, both averaged over all rows.

    Their sum is that of the joint label, because a conversion is a click first.
    """
    loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return loss[:, CLICK].mean(), (loss[:, CONVERSION] * labels[:, CLICK]).mean()
