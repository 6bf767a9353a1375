"""Benchmark ``freshness``: how well a model predicts by how often it takes what its trainer has learned since.

The first test rows are replayed in time order. One trainer learns from the events of each minute when the minute is
over (``ONLINE_TABLES``). Serving copies take its state by deltas, through the very code that a station uses: every
minute, every hour, every day, never. Each row is scored by what each copy had at its time, so all copies differ in
nothing but age. Time is simulated: what counts is the order of events, not how long the machine takes.

A copy takes the tables and the counters of the items (counted over the events before the sync).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS_DIR, Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.embedding.catalog import GROUP as CATALOG
from models.embedding.catalog import ItemCatalog
from models.embedding.tables import ReferenceTables
from models.heads import CLICK, probabilities
from models.inputs import counter_features
from models.ranker import Ranker
from models.source import MemorySource, Tensors
from models.stations import load_network
from models.updates import LiveConfig, LiveSource, LiveState, live_weights
from shared.clock import SystemClock
from shared.settings import load_settings
from shared.weights.state import TensorState
from training.chart import line_chart
from training.config import OptimizerConfig, TrainConfig, load_train_config
from training.data import Dataset, HistoryReader, Rows, load_dataset, request_batches
from training.data.split import Split
from training.deltas import DeltaPublisher
from training.evaluate import predict
from training.loop import Trainer, train
from training.metrics import Metrics
from training.model import TrainedModel

CONFIG: Final = Path("configs/train/quick.yaml")
INTERVALS_S: Final[dict[str, int | None]] = {"minute": 60, "hour": 3_600, "day": 86_400, "never": None}
NUM_ROWS, QUICK_ROWS = 20_000, 600
TRAIN_SHARE, QUICK_TRAIN_SHARE = 0.25, 0.02
"""Newest share of the rows before the replay that the model is trained on: the replay is what takes the time."""

REPLAY_S_MAX: Final = 360.0
"""A busy machine replays fewer rows than ``NUM_ROWS``, and the row of results says how many."""

ONLINE = OptimizerConfig(network_rate=1e-5, table_rate=2e-3, warmup_steps=0, final_share=1.0)
"""Constant rates, since a stream has no end."""

ONLINE_TABLES: Final = ("user",)
"""What goes on learning: batches of a minute hold three rows, all of one or two users. The rest is frozen: on
validation rows, the same learning in the network, or in tables that all users share, made the next rows worse."""

CHART: Final = RESULTS_DIR / "freshness.svg"


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train up to the test rows, replay them, and report NE of clicks by interval."""
    share = QUICK_TRAIN_SHARE if options.quick else TRAIN_SHARE
    config = load_train_config(CONFIG).model_copy(update={"seed": options.seed, "train_share": share})
    dataset = load_dataset(
        config.dataset, load_settings().data_dir, seed=config.seed, synthetic=config.synthetic, synthetic_fallback=True
    )
    dataset = up_to_date(dataset)
    rows = dataset.split.test.select(slice(0, QUICK_ROWS if options.quick else NUM_ROWS))
    console = Console(stderr=True, highlight=False)
    replay = Replay(train(config, dataset), config, dataset)
    console.print(f"trained; replays at most {len(rows):,} rows in {REPLAY_S_MAX:.0f} s")
    chances = replay.run(rows, REPLAY_S_MAX)
    rows = rows.select(slice(0, len(chances["never"])))
    params: dict[str, Param] = {
        "dataset": dataset.name,
        "rows": len(rows),
        "days": round(float(rows.timestamp_s[-1] - rows.timestamp_s[0]) / 86_400, 1),
        "tier": "deepest exit",
        "train_share": share,
        "learns": ", ".join(ONLINE_TABLES),
    }
    found = {name: Metrics.of(chance, rows.click, rows.user_index) for name, chance in chances.items()}
    figures = [
        Measurement(f"ne_{name}", metrics.ne, "NE", num_samples=len(rows), params={**params, "auc": metrics.auc})
        for name, metrics in found.items()
    ]
    figures += [
        Measurement(f"bytes_{name}", replay.copies[name].bytes_per_sync, "B", params=params)
        for name, interval_s in INTERVALS_S.items()
        if interval_s is not None
    ]
    _show(found, replay)
    if not options.quick:
        _draw(chances, rows)
    return BenchmarkReport(tuple(figures), config.digest())


def up_to_date(dataset: Dataset) -> Dataset:
    """Return the data with training up to a quarter of the validation rows before the test rows.

    Every copy begins as fresh as the split allows; otherwise the first sync would make up for a month.
    """
    split, log = dataset.split, dataset.log
    cut = len(split.valid) * 3 // 4
    positions = np.concatenate([split.train.event_position, split.valid.event_position[:cut]])
    fresh = Split(train=log.rows(positions), valid=split.valid.select(slice(cut, None)), test=split.test)
    return replace(dataset, split=fresh)


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

    def before(self, time_s: int) -> npt.NDArray[np.float32]:
        """Return the counter features of all items from events strictly before ``time_s``: float32 [I, counters]."""
        end = int(np.searchsorted(self._rows.timestamp_s, time_s))
        items = self._items[self._done : end]
        for index, hits in enumerate((np.ones(len(items), np.bool_), *self._labels(end))):
            np.add.at(self._counts[index], items[hits], 1)
        self._done = max(end, self._done)
        return counter_features(*self._counts)

    def _labels(self, end: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        return self._rows.click[self._done : end], self._rows.conversion[self._done : end]


class Copy:
    """What one station serves, updated at its interval.

    Args:
        model: The model at the start.
        base: Its groups, as published.
        interval_s: Seconds between syncs; None: never.
    """

    def __init__(self, model: TrainedModel, base: MemorySource, interval_s: int | None) -> None:
        self.interval_s = interval_s
        self.num_syncs = 0
        self.bytes_sent = 0
        self._model = model
        self._base = base
        self._publisher = DeltaPublisher(TensorState(base.version, base.groups, {}))
        # All rows of all tables may change in one sync, and nobody holds old states here.
        config = LiveConfig(spare_share=2.0, keep_states=1, undo_bytes_max=0)
        self._live = live_weights(base, base.groups, config, build=self._build)

    @property
    def bytes_per_sync(self) -> float:
        """Mean size of a delta."""
        return self.bytes_sent / max(self.num_syncs, 1)

    @property
    def model(self) -> TrainedModel:
        """The model that serves."""
        served: TrainedModel = self._live.state.built
        return served

    def sync(self, groups: dict[str, Tensors]) -> None:
        """Take the trainer's state."""
        delta = self._publisher.publish(groups)
        self._live.apply(delta)
        self.num_syncs += 1
        self.bytes_sent += len(delta.payload)

    def _build(self, state: LiveState, before: LiveState | None) -> TrainedModel:
        source = LiveSource(self._base, state)
        trained = self._model.ranker
        with torch.device("meta"):
            tables = ReferenceTables(trained.config, self._model.index.num_rows)
        weights = {
            f"weights.{table.name}": torch.from_numpy(state.array(f"tables/{table.name}/weight"))
            for table in trained.config.tables
        }
        tables.load_state_dict(weights, assign=True)
        # A copy with parts of its own: making a whole ranker anew would be most of what a sync costs here.
        ranker = copy(trained)
        ranker.__dict__["_modules"] = {"tables": tables, "network": load_network(source, trained.config)}
        index = replace(self._model.index, catalog=ItemCatalog.from_weights(source))
        return replace(self._model, ranker=ranker.eval(), index=index)


@dataclass(frozen=True, slots=True)
class Minute:
    """Rows of one minute, and when it is over."""

    rows: slice
    end_s: int


def minutes(timestamp_s: npt.NDArray[np.int64]) -> Iterator[Minute]:
    """Yield the runs of rows of equal minute: int64 [N], ascending."""
    number = timestamp_s // 60
    starts = np.flatnonzero(np.append(True, number[1:] != number[:-1])).tolist()
    for begin, end in zip(starts, [*starts[1:], len(number)], strict=True):
        yield Minute(slice(begin, end), int(number[begin] + 1) * 60)


class Replay:
    """One trainer that learns minute by minute, and the copies that follow it.

    Args:
        model: The model at the start.
        config: How it was trained.
        dataset: The data, up to date.
    """

    def __init__(self, model: TrainedModel, config: TrainConfig, dataset: Dataset) -> None:
        self._dataset = dataset
        self._reader = HistoryReader(dataset.log, config.model.history_length, "strict", align="right")
        self._counts = Counts(dataset)
        self._model = model
        self._ranker = _copy_of(model.ranker)
        learning = {f"tables.weights.{table}" for table in ONLINE_TABLES}
        for name, parameter in self._ranker.named_parameters():
            parameter.requires_grad_(name in learning)
        online = config.model_copy(update={"optimizer": ONLINE})
        self._batch_rows = config.batch_rows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # the trainer draws a head of its own
            self._trainer = Trainer(online, model.index, self._reader, self._ranker, 1)
        self._learn(dataset.split.valid)  # fills Adam's averages before anything is compared
        base = MemorySource("freshness", self._groups(dataset.split.test_start_s))
        base.documents["model"] = config.model.model_dump(mode="json")
        self.copies = {name: Copy(model, base, interval_s) for name, interval_s in INTERVALS_S.items()}

    def run(self, rows: Rows, seconds_max: float = math.inf) -> dict[str, npt.NDArray[np.float64]]:
        """Replay rows in time order.

        Args:
            rows: The rows.
            seconds_max: Stop at the end of a minute of rows when so much real time has passed.

        Returns:
            Interval -> float64 [N], predicted probability of a click at each row's time, of the N rows replayed.
        """
        clock, end = SystemClock(), len(rows)
        until_s = clock.monotonic_s() + seconds_max
        chances = {name: np.zeros(len(rows)) for name in self.copies}
        waiting = dict.fromkeys(self.copies, 0)  # the first row that a copy has not scored yet
        for minute in minutes(rows.timestamp_s):
            if minute.rows.start and clock.monotonic_s() > until_s:
                end = minute.rows.start
                break
            now_s = int(rows.timestamp_s[minute.rows.start])
            for name, held in self.copies.items():
                if held.interval_s is not None and waiting[name] < minute.rows.start:
                    last_s = int(rows.timestamp_s[minute.rows.start - 1])
                    if now_s // held.interval_s != last_s // held.interval_s:
                        self._score(held, rows, waiting[name], minute.rows.start, chances[name])
                        waiting[name] = minute.rows.start
                        held.sync(self._groups(now_s // held.interval_s * held.interval_s))
            self._learn(rows.select(minute.rows))
        for name, held in self.copies.items():
            self._score(held, rows, waiting[name], end, chances[name])
        return {name: chance[:end] for name, chance in chances.items()}

    def _learn(self, rows: Rows) -> None:
        self._ranker.train()
        for batch in request_batches(rows, self._reader, self._batch_rows):
            self._trainer.step(batch)
        self._ranker.eval()

    def _score(self, held: Copy, rows: Rows, begin: int, end: int, out: npt.NDArray[np.float64]) -> None:
        model, depth = held.model, max(held.model.ranker.config.depths)
        logits = predict(model, self._dataset, rows.select(slice(begin, end)), "strict")[depth]
        out[begin:end] = probabilities(model.calibration.apply(logits, depth))[:, CLICK]

    def _groups(self, time_s: int) -> dict[str, Tensors]:
        source = replace(self._model, ranker=self._ranker).source()
        return source.groups | {CATALOG: source.groups[CATALOG] | {"counters": self._counts.before(time_s)}}


def _copy_of(ranker: Ranker) -> Ranker:
    """Return a ranker with parameters of its own."""
    num_rows = {name: len(weight) for name, weight in ranker.tables.weights.items()}
    held = Ranker(ranker.config, num_rows, ranker.item_genres.numpy())
    held.load_state_dict(ranker.state_dict())
    return held


def _show(found: dict[str, Metrics], replay: Replay) -> None:
    table = Table(title="freshness: clicks, by time between syncs", title_justify="left")
    for name in ("sync every", "NE", "AUC", "calibration", "syncs", "bytes a sync"):
        table.add_column(name, justify="left" if name == "sync every" else "right")
    for name, metrics in found.items():
        held = replay.copies[name]
        table.add_row(
            name,
            f"{metrics.ne:.4f}",
            f"{metrics.auc:.4f}",
            f"{metrics.calibration:.3f}",
            f"{held.num_syncs:,}",
            f"{held.bytes_per_sync:,.0f}",
        )
    Console(stderr=True, highlight=False).print(table)


def _draw(chances: dict[str, npt.NDArray[np.float64]], rows: Rows, path: Path = CHART) -> None:
    """Draw the running NE since the start, by day."""
    days = (rows.timestamp_s - rows.timestamp_s[0]) / 86_400
    ends = np.unique(np.searchsorted(days, np.arange(1, int(days[-1]) + 2), side="left"))
    ends = ends[ends > 500]
    lines = {
        f"every {name}" if INTERVALS_S[name] else name: [
            Metrics.of(chance[:end], rows.click[:end], rows.user_index[:end]).ne for end in ends
        ]
        for name, chance in chances.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    xs = [float(days[end - 1]) for end in ends]
    path.write_text(
        line_chart(xs, lines, "NE of clicks since the start, by time between syncs", "days of replay", "NE"),
        encoding="utf-8",
    )
