"""Benchmark ``freshness``: how well a model predicts by how often serving takes what has been learned since.

The base is the version that ``make run`` publishes, trained on the training rows of T1. From there on the rows of users
go on learning with every minute of events (``training.online``), and the items' counters go on counting. Serving copies
take both by deltas: every minute, every hour, every day, never. The validation rows are the stream's beginning, on
which the rate is chosen; then the test rows are replayed in time order, each scored by the network with what each copy
had at its time. Time is simulated: what counts is the order of events, not how long the machine takes.

So the copies differ in nothing but age. History is fresh in all of them: that is the user log's work, not the weights'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS_DIR, Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from cluster.weights import find_trained
from models.config import RankerConfig
from models.embedding.catalog import GROUP as CATALOG
from models.heads import CLICK, probabilities
from models.inputs import counter_features
from models.source import MemorySource, Tensors
from shared.settings import load_settings
from shared.weights import WeightStore
from shared.weights.state import TensorState
from training.chart import line_chart
from training.config import TrainConfig, load_train_config
from training.data import Dataset, HistoryReader, Rows, load_dataset
from training.deltas import DeltaPublisher
from training.loop import train, train_and_publish
from training.metrics import Metrics
from training.model import TrainedModel
from training.online import (
    OnlineConfig,
    Tangents,
    UserRowLearner,
    cached_tangents,
    next_state,
    score,
    tangents,
    user_table,
)

CONFIG: Final = Path("configs/train/quick.yaml")
INTERVALS_S: Final[dict[str, int | None]] = {"minute": 60, "hour": 3_600, "day": 86_400, "never": None}
RATES: Final = (0.01, 0.03, 0.1)
"""Tried on the validation rows; the one with the best NE when every minute is learned is used on the test rows."""

QUICK_ROWS, QUICK_TRAIN_SHARE = 600, 0.02
SYNCS_MEASURED = 50
"""Syncs of each copy whose deltas are made, for their size."""

CHART: Final = RESULTS_DIR / "freshness.svg"


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Replay the test rows, and report NE of clicks by interval."""
    config = load_train_config(CONFIG).model_copy(update={"seed": options.seed})
    settings = load_settings()
    torch.set_num_threads(config.threads or torch.get_num_threads())
    dataset = load_dataset(
        config.dataset, settings.data_dir, seed=config.seed, synthetic=config.synthetic, synthetic_fallback=True
    )
    reader = HistoryReader(dataset.log, config.model.history_length, "strict", align="right")
    valid, test = dataset.split.valid, dataset.split.test
    if options.quick:
        valid, test = valid.select(slice(0, QUICK_ROWS)), test.select(slice(0, QUICK_ROWS))
        model = train(config.model_copy(update={"train_share": QUICK_TRAIN_SHARE}), dataset)
        before, during = tangents(model, reader, valid), tangents(model, reader, test)
    else:
        version, model = base_model(config, dataset, str(settings.var_dir.absolute() / "weights"))
        cache = settings.var_dir / "freshness"
        before, during = (
            cached_tangents(model, reader, rows, cache / f"{version}-{name}-{len(rows)}.npz")
            for name, rows in (("valid", valid), ("test", test))
        )
    rate = choose_rate(user_table(model), before, valid)
    replay = Replay(model, dataset, OnlineConfig(rate=rate))
    replay.learn_all(before, valid)
    chances = replay.run(during, test, reader)
    params: dict[str, Param] = {
        "dataset": dataset.name,
        "rows": len(test),
        "days": round(float(test.timestamp_s[-1] - test.timestamp_s[0]) / 86_400, 1),
        "tier": "deepest exit",
        "learns": "rows of users, counters of items",
        "rate": rate,
    }
    found = {name: Metrics.of(chance, test.click, test.user_index) for name, chance in chances.items()}
    figures = [
        Measurement(f"ne_{name}", metrics.ne, "NE", num_samples=len(test), params={**params, "auc": metrics.auc})
        for name, metrics in found.items()
    ]
    figures += [
        Measurement(f"bytes_{name}", held.bytes_per_sync, "B", num_samples=held.num_measured, params=params)
        for name, held in replay.copies.items()
        if held.num_measured
    ]
    _show(found, replay.copies, rate)
    if not options.quick:
        _draw(chances, test)
    return BenchmarkReport(tuple(figures), config.digest())


def base_model(config: TrainConfig, dataset: Dataset, store_url: str) -> tuple[str, TrainedModel]:
    """Return the newest version of a configuration, trained and published first where there is none."""
    store = WeightStore(store_url)
    found = find_trained(store, config)
    if found is None:
        train_and_publish(CONFIG, load_settings().data_dir, store_url, Console(stderr=True, highlight=False))
        found = find_trained(store, config)
    if found is None:
        raise ValueError(f"the store must have weights of {CONFIG} with seed {config.seed}; train them first")
    return found.version, TrainedModel.from_weights(store.open(found.version), dataset)


def choose_rate(weight: npt.NDArray[np.float32], seen: Tangents, rows: Rows) -> float:
    """Return the rate with the best NE on rows that are learned minute by minute."""

    def ne(rate: float) -> float:
        learner = UserRowLearner(weight, OnlineConfig(rate=rate))
        logits = [learner.learn(seen.select(part), rows.click[part]) for part in minutes(rows.timestamp_s)]
        chance = 1.0 / (1.0 + np.exp(-np.concatenate(logits).astype(np.float64)))
        return Metrics.of(chance, rows.click, rows.user_index).ne

    return min(RATES, key=ne)


class Counts:
    """Impressions, clicks and conversions of every item before a time that only moves forward.

    Args:
        dataset: The log.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._rows = dataset.log.rows(dataset.log.time_order)
        self._items = dataset.catalog.positions(self._rows.item_id)
        self._counts = np.zeros((3, len(dataset.catalog)), np.int64)
        self._done = 0

    def move_to(self, time_s: int) -> None:
        """Count the events strictly before ``time_s``."""
        end = max(int(np.searchsorted(self._rows.timestamp_s, time_s)), self._done)
        new = slice(self._done, end)
        items = self._items[new]
        np.add.at(self._counts[0], items, 1)
        for index, hits in enumerate((self._rows.click[new], self._rows.conversion[new]), start=1):
            np.add.at(self._counts[index], items[hits], 1)
        self._done = end

    def features(self, positions: npt.NDArray[np.int64] | slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return the counter features of items, by place in the catalog: float32 [N, counters]."""
        return counter_features(*self._counts[:, positions])


@dataclass(slots=True)
class Copy:
    """What one serving copy holds.

    Args:
        interval_s: Seconds between syncs; None: never.
        table: float32 [U, D], its rows of users.
        counts: Its items' counters; None: as published.
        publisher: Makes its deltas.
    """

    interval_s: int | None
    table: npt.NDArray[np.float32]
    counts: Counts | None
    publisher: DeltaPublisher
    stale: list[npt.NDArray[np.int64]] = field(default_factory=list)
    num_syncs: int = 0
    num_measured: int = 0
    bytes_sent: int = 0

    @property
    def bytes_per_sync(self) -> float:
        """Mean size of the deltas that were made."""
        return self.bytes_sent / max(self.num_measured, 1)

    def is_due(self, last_s: int, now_s: int) -> bool:
        """Tell whether a sync lies between two times."""
        return self.interval_s is not None and now_s // self.interval_s != last_s // self.interval_s

    def sync(self, learner: UserRowLearner, now_s: int) -> None:
        """Take what was learned, and counted up to the newest sync before ``now_s``."""
        assert self.interval_s is not None
        if self.stale:
            rows = np.unique(np.concatenate(self.stale))
            self.table[rows] = learner.rows(rows)
            self.stale.clear()
        if self.counts is not None:
            self.counts.move_to(now_s // self.interval_s * self.interval_s)
        self.num_syncs += 1


def minutes(timestamp_s: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Yield the runs of rows of equal minute: int64 [N], ascending."""
    if not len(timestamp_s):
        return
    number = timestamp_s // 60
    starts = np.flatnonzero(np.append(True, number[1:] != number[:-1])).tolist()
    for begin, end in zip(starts, [*starts[1:], len(number)], strict=True):
        yield slice(begin, end)


class Replay:
    """One learner, and the copies that follow it.

    Args:
        model: The published model.
        dataset: Its data.
        config: Of the learner.
    """

    def __init__(self, model: TrainedModel, dataset: Dataset, config: OnlineConfig) -> None:
        self._model = model
        self._dataset = dataset
        self._learner = UserRowLearner(user_table(model), config)
        self._base = model.source()
        self.copies = {name: self._copy(interval_s) for name, interval_s in INTERVALS_S.items()}

    def learn_all(self, seen: Tangents, rows: Rows) -> None:
        """Learn rows minute by minute; every copy but the one that is never synced has it all."""
        for part in minutes(rows.timestamp_s):
            self._learner.learn(seen.select(part), rows.click[part])
        moved = self._learner.take()
        for held in self.copies.values():
            if held.interval_s is not None:
                held.table[moved] = self._learner.rows(moved)

    def run(self, seen: Tangents, rows: Rows, reader: HistoryReader) -> dict[str, npt.NDArray[np.float32]]:
        """Replay rows in time order.

        Returns:
            Interval -> float32 [N], predicted probability of a click at each row's time.
        """
        positions = self._dataset.catalog.positions(rows.item_id)
        published = self._model.index.catalog.counters
        held_rows = {name: np.empty_like(seen.jacobians) for name in self.copies}
        held_counters = {name: published[positions].copy() for name in self.copies}
        last_s = int(rows.timestamp_s[0]) - max(filter(None, INTERVALS_S.values()), default=0)
        for part in minutes(rows.timestamp_s):
            now_s = int(rows.timestamp_s[part.start])
            users = seen.user_rows[part]
            for name, held in self.copies.items():
                if held.is_due(last_s, now_s):
                    held.sync(self._learner, now_s)
                    self._measure(held)
                held_rows[name][part] = held.table[users]
                if held.counts is not None:
                    held_counters[name][part] = held.counts.features(positions[part])
                    held.stale.append(users)
            self._learner.learn(seen.select(part), rows.click[part])
            last_s = now_s
        depth = max(self._model.ranker.config.depths)
        chances = {}
        for name in self.copies:
            logits = score(self._model, reader, rows, held_rows[name], held_counters[name])
            chances[name] = probabilities(self._model.calibration.apply(logits, depth))[:, CLICK]
        return chances

    def _copy(self, interval_s: int | None) -> Copy:
        publisher = DeltaPublisher(TensorState(self._base.version, self._base.groups, {}))
        counts = None if interval_s is None else Counts(self._dataset)
        return Copy(interval_s, user_table(self._model).copy(), counts, publisher)

    def _measure(self, held: Copy) -> None:
        """Make the delta of one of the first syncs."""
        if held.num_measured >= SYNCS_MEASURED or held.counts is None:
            return
        groups = synced(self._base, self._model.ranker.config, held)
        delta = held.publisher.publish(groups)
        if held.num_syncs > 1:  # the first also brings all of the validation rows
            held.num_measured += 1
            held.bytes_sent += len(delta.payload)


def synced(base: MemorySource, config: RankerConfig, held: Copy) -> dict[str, Tensors]:
    """Return the groups of what a copy serves."""
    groups = next_state(base, config, held.table)
    if held.counts is None:
        return groups
    return groups | {CATALOG: base.groups[CATALOG] | {"counters": held.counts.features()}}


def _show(found: Mapping[str, Metrics], copies: Mapping[str, Copy], rate: float) -> None:
    table = Table(title=f"freshness: clicks, by time between syncs; rate {rate:g}", title_justify="left")
    for name in ("sync every", "NE", "AUC", "calibration", "syncs", "bytes a sync"):
        table.add_column(name, justify="left" if name == "sync every" else "right")
    for name, metrics in found.items():
        table.add_row(
            name,
            f"{metrics.ne:.4f}",
            f"{metrics.auc:.4f}",
            f"{metrics.calibration:.3f}",
            f"{copies[name].num_syncs:,}",
            f"{copies[name].bytes_per_sync:,.0f}",
        )
    Console(stderr=True, highlight=False).print(table)


def _draw(chances: Mapping[str, npt.NDArray[np.float32]], rows: Rows, path: Path = CHART) -> None:
    """Draw the NE that each copy gains over the one that never syncs, since the start, by share of the rows."""
    ends = np.linspace(len(rows) // 20, len(rows), 20).astype(int)
    running = {
        name: [Metrics.of(chance[:end], rows.click[:end], rows.user_index[:end]).ne for end in ends]
        for name, chance in chances.items()
    }
    lines = {
        name if INTERVALS_S[name] is None else f"every {name}": [
            one - never for one, never in zip(values, running["never"], strict=True)
        ]
        for name, values in running.items()
    }
    xs = [float(end) / 1_000 for end in ends]
    title = "NE of clicks since the start, less that of never syncing"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line_chart(xs, lines, title, "thousand test rows", "NE"), encoding="utf-8")
