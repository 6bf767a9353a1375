"""Measures a ranker on held-out rows, as published and as served, for each tier; fits the calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from models.calibration import Calibration, fit_platt
from models.config import OBJECTIVES, WEIGHTS_FORMAT
from models.heads import CLICK, CONVERSION, probabilities
from models.layers.layout import CandidateLayout
from models.ranker import RequestTensors
from models.source import WeightSource
from shared.clock import Clock, SystemClock
from shared.config import Config
from shared.errors import WeightsError
from training.config import TrainConfig
from training.data import Dataset, HistoryMode, HistoryReader, Rows, load_dataset, request_batches
from training.metrics import Metrics
from training.model import TrainedModel
from training.progress import RowsProgress

SplitName: TypeAlias = Literal["train", "valid", "test"]

Predictions: TypeAlias = dict[int, npt.NDArray[np.float32]]
"""depth, 0 for the first pass -> logits float32 [N, O] of N rows, before calibration."""

_BATCH_ROWS = 4096
_MODES: tuple[HistoryMode, ...] = ("pub", "strict")


class Evaluation(Config):
    """Quality of one tier on one split.

    Args:
        split: The rows.
        history_mode: ``strict``: what a server knows; ``pub``: as published, events of the same second included.
        tier: The tier.
        objectives: Metrics by objective.
    """

    split: SplitName
    history_mode: HistoryMode
    tier: str
    objectives: dict[str, Metrics]


@torch.inference_mode()
def predict(
    model: TrainedModel,
    dataset: Dataset,
    rows: Rows,
    history_mode: HistoryMode,
    progress: RowsProgress | None = None,
) -> Predictions:
    """Score rows at every depth, without speculative embeddings, in their order; ``progress`` is told of them."""
    ranker = model.ranker
    reader = HistoryReader(dataset.log, ranker.config.history_length, history_mode, align="right")
    parts: dict[int, list[npt.NDArray[np.float32]]] = {depth: [] for depth in ranker.config.depths}
    for batch in request_batches(rows, reader, _BATCH_ROWS):
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        state = ranker.encode(RequestTensors.of(model.index.requests(batch)))
        candidates = model.index.candidates(batch.candidates, streaming=False)
        logits, _ = ranker.network.all_depths(state, ranker.pool(candidates), candidates.counters, None, None, layout)
        for depth, values in logits.items():
            parts[depth].append(values.numpy())
        if progress is not None:
            progress.add(batch.num_candidates)
    nothing = np.zeros((0, len(OBJECTIVES)), np.float32)
    return {depth: np.concatenate([nothing, *found]) for depth, found in parts.items()}


def evaluate(
    model: TrainedModel, dataset: Dataset, split: SplitName, history_mode: HistoryMode, tier: str
) -> Evaluation:
    """Measure one tier on one split.

    Raises:
        KeyError: there is no such tier.
    """
    rows: Rows = getattr(dataset.split, split)
    return _measure(model, rows, predict(model, dataset, rows, history_mode), split, history_mode, tier)


def evaluate_all(model: TrainedModel, dataset: Dataset, progress: RowsProgress | None = None) -> list[Evaluation]:
    """Measure every tier, the deepest first, on the test rows, as published and as served.

    Args:
        model: What is measured.
        dataset: Its data.
        progress: Is told of rows; both passes over the test rows count.
    """
    config = model.ranker.config
    tiers = sorted(config.tiers, key=config.depth, reverse=True)
    evaluations = []
    for mode in _MODES:
        predictions = predict(model, dataset, dataset.split.test, mode, progress)
        evaluations += [_measure(model, dataset.split.test, predictions, "test", mode, tier) for tier in tiers]
    return evaluations


def evaluate_version(
    reader: WeightSource, data_dir: Path, console: Console, progress_console: Console, clock: Clock | None = None
) -> list[Evaluation]:
    """Measure a published version on the data that it was trained on, and show the table.

    Args:
        reader: The version.
        data_dir: Folder of fetched data.
        console: Where the table is shown.
        progress_console: Where it is told how far the passes are.
        clock: Measures them.

    Raises:
        DataUnavailableError: the data cannot be had.
        WeightsError: the weights do not fit their model.
    """
    dataset = dataset_of(reader, data_dir)
    model = TrainedModel.from_weights(reader, dataset)
    rows_total = len(_MODES) * len(dataset.split.test)
    with RowsProgress(progress_console, clock or SystemClock(), "evaluate", rows_total) as progress:
        evaluations = evaluate_all(model, dataset, progress)
    show_evaluations(evaluations, console, f"{reader.version}: {dataset.name}")
    console.print(dataset.provenance, style="dim")
    return evaluations


def check_release(reader: WeightSource) -> None:
    """Refuse weights that another release has published, before their parts are found not to fit.

    Raises:
        WeightsError: it did.
    """
    found = reader.json("metrics").get("format")
    if found != WEIGHTS_FORMAT:
        raise WeightsError(
            f"weights {reader.version} are of another release: their format is {found}, this one has {WEIGHTS_FORMAT}; "
            "`rankmesh train` makes new ones",
            version=reader.version,
            file="metrics",
        )


def dataset_of(reader: WeightSource, data_dir: Path) -> Dataset:
    """Load the data that a published version was trained on.

    Raises:
        DataUnavailableError: the data cannot be had.
        WeightsError: another release has published it.
    """
    check_release(reader)
    config = TrainConfig.model_validate(reader.json("metrics")["train"])
    return load_dataset(
        config.dataset,
        data_dir,
        seed=config.seed,
        synthetic=config.synthetic,
        synthetic_fallback=config.synthetic_fallback,
    )


def fit_calibration(predictions: Predictions, rows: Rows) -> Calibration:
    """Fit scale and offset of each depth and objective; the conversion's on clicked rows, as it is trained."""
    parameters: dict[int, npt.NDArray[np.float32]] = {}
    for depth, predicted in predictions.items():
        logits = predicted.astype(np.float64)
        click = fit_platt(logits[:, CLICK], rows.click)
        conversion = fit_platt(logits[rows.click, CONVERSION], rows.conversion[rows.click])
        parameters[depth] = np.array([click, conversion], np.float32).T.copy()
    return Calibration(parameters)


def show_evaluations(evaluations: list[Evaluation], console: Console, title: str) -> None:
    """Print a table of quality that fits 80 columns."""
    splits = ", ".join(dict.fromkeys(evaluation.split for evaluation in evaluations))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("history", "tier", "objective"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "AUC", "logloss", "NE", "calib.", "gAUC"):
        table.add_column(name, justify="right", no_wrap=True)
    for evaluation in evaluations:
        for objective, metrics in evaluation.objectives.items():
            table.add_row(
                evaluation.history_mode,
                evaluation.tier,
                objective,
                f"{metrics.num_rows:,}",
                f"{metrics.auc:.4f}",
                f"{metrics.logloss:.4f}",
                f"{metrics.ne:.4f}",
                f"{metrics.calibration:.3f}",
                f"{metrics.gauc:.4f}",
            )
    console.print(f"{title}, {splits}", style="bold")
    console.print(table)


def _measure(
    model: TrainedModel, rows: Rows, predictions: Predictions, split: SplitName, mode: HistoryMode, tier: str
) -> Evaluation:
    depth = model.ranker.config.depth(tier)
    chance = probabilities(model.calibration.apply(predictions[depth], depth))
    labels = {"click": rows.click, "conversion": rows.conversion}
    objectives = {
        name: Metrics.of(chance[:, column], labels[name], rows.user_index) for column, name in enumerate(OBJECTIVES)
    }
    return Evaluation(split=split, history_mode=mode, tier=tier, objectives=objectives)
