"""``rankmesh simplify``: makes published weights smaller, measures what that costs, and publishes the result.

The new version keeps the training configuration of the old one, so a mesh that looks for weights of that configuration
finds the simplified ones, which are newer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from models.flops import candidate_flops, request_flops
from models.layers.layout import CandidateLayout
from models.network import RankingNetwork
from models.ranker import RequestTensors
from models.simplify import Removal, num_parameters, simplify
from shared.clock import SystemClock
from shared.errors import ConfigError
from shared.weights import Derivation, WeightStore
from training.config import TrainConfig
from training.data import Dataset, HistoryReader, Rows, request_batches
from training.evaluate import Evaluation, check_release, dataset_of, evaluate_all
from training.model import TrainedModel
from training.progress import RowsProgress
from training.publish import publish
from training.routing import fit_on_held_out

CALIBRATION_ROWS = 50_000
"""Newest training rows on which contributions are measured."""

_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class SimplifyReport:
    """What simplification did.

    Args:
        source: Version that was simplified.
        threshold: Largest relative contribution that was removed.
        removals: Units before and after, by place and kind.
        sizes: Name -> before and after: parameters of the network, FLOPs of the request side and of a candidate.
        quality: tier -> click NE before and after, on the test rows with the history that a server knows.
    """

    source: str
    threshold: float
    removals: tuple[Removal, ...]
    sizes: dict[str, tuple[int, int]]
    quality: dict[str, tuple[float, float]]

    def document(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "source": self.source,
            "threshold": self.threshold,
            "removed": {
                f"{row.place}, {row.unit}": [row.before, row.after] for row in self.removals if row.before != row.after
            },
            "sizes": {name: list(pair) for name, pair in self.sizes.items()},
            "click_ne": {tier: list(pair) for tier, pair in self.quality.items()},
        }


def simplify_version(
    store: WeightStore,
    version: str,
    data_dir: Path,
    threshold: float,
    console: Console,
    multiple: int = 1,
    progress_console: Console | None = None,
) -> tuple[str, SimplifyReport]:
    """Simplify a published version, show the tables and publish the smaller model as a new version.

    Args:
        store: Where the version is and the new one goes.
        version: What to simplify.
        data_dir: Folder of fetched data.
        threshold: See ``models.simplify``.
        console: Where the tables are shown.
        multiple: See ``models.simplify``.
        progress_console: Where it is told how far the passes are; None: nowhere.

    Returns:
        The new version and what was done.

    Raises:
        ConfigError: the model has biases.
        DataUnavailableError: the data cannot be had.
        ValueError: the threshold is out of range.
        WeightsError: the weights do not fit their model, or the smaller ones do not equal the oracle.
    """
    reader = store.open(version)
    check_release(reader)
    metrics = reader.json("metrics")
    config = TrainConfig.model_validate(metrics["train"])
    if config.model.bias:
        raise ConfigError(
            f"weights {version} have biases, which cannot be simplified", field="model.bias", value="true"
        )
    dataset = dataset_of(reader, data_dir)
    model = TrainedModel.from_weights(reader, dataset)
    told = progress_console or Console(quiet=True)
    told.print(f"measuring what each unit contributes on {CALIBRATION_ROWS:,} training rows", style="dim")
    smaller, removals = simplify_model(model, dataset, threshold, multiple=multiple)
    with RowsProgress(told, SystemClock(), "evaluate before and after", 4 * len(dataset.split.test)) as progress:
        before, after = (evaluate_all(each, dataset, progress) for each in (model, smaller))
    report = SimplifyReport(
        source=version,
        threshold=threshold,
        removals=removals,
        sizes=_sizes(model.ranker.network, smaller.ranker.network),
        quality=_click_ne(before, after),
    )
    show_report(report, console)
    notes = {"simplified": report.document()}
    derived = Derivation(parent=version, made_by="simplify")
    made = publish(smaller, config, dataset, after, store, metrics["train_s"], notes, derived)
    console.print(f"published weights [bold]{made}[/bold]")
    return made, report


def simplify_model(
    model: TrainedModel, dataset: Dataset, threshold: float, num_rows: int = CALIBRATION_ROWS, multiple: int = 1
) -> tuple[TrainedModel, tuple[Removal, ...]]:
    """Return a model without the units that contribute nothing on the newest training rows, calibrated again.

    Args:
        model: The model, left as it is.
        dataset: Its data.
        threshold: See ``models.simplify``.
        num_rows: Newest training rows to measure on.
        multiple: See ``models.simplify``.
    """
    train = dataset.split.train
    rows = train.select(slice(max(len(train) - num_rows, 0), len(train)))
    found = simplify(model.ranker.network, lambda network: _run(model, network, dataset, rows), threshold, multiple)
    smaller = TrainedModel(model.ranker.with_network(found.network), model.index, model.calibration)
    return fit_on_held_out(smaller, dataset), found.removals


def show_report(report: SimplifyReport, console: Console) -> None:
    """Print what was removed and what it cost."""
    console.print(f"[bold]{report.source}[/bold], threshold {report.threshold:g}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("place", "unit"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for row in report.removals:
        if row.before != row.after:
            table.add_row(row.place, row.unit, str(row.before), str(row.after))
    for name, (before, after) in report.sizes.items():
        table.add_row("network", name, f"{before:,}", f"{after:,}")
    for tier, (ne_before, ne_after) in report.quality.items():
        table.add_row(f"tier {tier}", "click NE, test", f"{ne_before:.5f}", f"{ne_after:.5f}")
    console.print(table)


@torch.no_grad()
def _run(model: TrainedModel, network: RankingNetwork, dataset: Dataset, rows: Rows) -> None:
    """Run a network on rows at every depth, with the tables of a model."""
    ranker = model.ranker.with_network(network)
    reader = HistoryReader(dataset.log, ranker.config.history_length, "strict", align="right")
    for batch in request_batches(rows, reader, _BATCH_ROWS):
        layout = CandidateLayout.of(torch.from_numpy(batch.request_index), batch.num_requests)
        candidates = model.index.candidates(batch.candidates, streaming=False)
        state = ranker.encode(RequestTensors.of(model.index.requests(batch)))
        network.all_depths(state, ranker.pool(candidates), candidates.counters, None, None, layout)


def _sizes(before: RankingNetwork, after: RankingNetwork) -> dict[str, tuple[int, int]]:
    sizes = {"parameters": (num_parameters(before), num_parameters(after))}
    configs = (before.config, after.config)
    num_tokens = before.config.encoder.num_tokens
    request = [sum(request_flops(config, num_tokens).values()) for config in configs]
    sizes["request FLOPs"] = (request[0], request[1])
    for depth in before.config.exits:
        candidate = [sum(candidate_flops(config, depth, num_tokens).values()) for config in configs]
        sizes[f"candidate FLOPs, exit {depth}"] = (candidate[0], candidate[1])
    return sizes


def _click_ne(before: list[Evaluation], after: list[Evaluation]) -> dict[str, tuple[float, float]]:
    return {
        old.tier: (old.objectives["click"].ne, new.objectives["click"].ne)
        for old, new in zip(before, after, strict=True)
        if old.history_mode == "strict"
    }
