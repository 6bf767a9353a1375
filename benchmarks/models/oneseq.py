"""Benchmark ``oneseq``: the events of several sources as one sequence, against a sequence a source, on real data.

Two worlds, both of real events:

* ``signals``: MovieLens-1M, each user's ratings of 4 and 5 as one source (item, rating, gap) and the others as a second
  that says no rating (item, gap), as impressions without a reaction do. Users have both, mixed in time.
* ``surfaces``: MovieLens-1M and MovieLens-100K as two surfaces over shared titles. No user has both, so what is shared
  is the networks, not the sequence.

Both models read the newest ``LENGTH`` events; ``merged`` as one sequence with one target attention, ``separate`` the
newest half of it from each source with networks and attention of its own. All else is equal: item, streaming counters
of the item, hidden layers. One pass in time order over the newest rows before the test rows, several seeds.

Operators are counted as the ones that torch dispatches for one batch of inference; floating-point operations with
torch's own counter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import interleaved, measure, quantiles
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.inputs import COUNTER_FEATURES, gap_buckets, weight_buckets
from models.oneseq import EventSourceConfig, OneSeq, OneSeqConfig
from shared.clock import SystemClock
from shared.settings import load_settings
from training.data import EventColumns, EventLog, HistoryBatch, HistoryReader, Rows, load_dataset
from training.data.split import T1_EARLIER_MIN
from training.indexing import streaming_counters
from training.metrics import Metrics

Form: TypeAlias = Literal["merged", "separate"]

FORMS: tuple[Form, ...] = ("merged", "separate")

LENGTH = 60
WIDTH, HIDDEN = 32, 64
BATCH_ROWS = 512
LEARNING_RATE = 2e-3
NUM_SEEDS = 3
TRAIN_ROWS, TEST_ROWS = 100_000, 30_000
QUICK_ROWS = 2_000
NUM_ROUNDS, QUICK_ROUNDS = 30, 3

LIKED_MIN = 4
SIGNALS = (EventSourceConfig(name="liked"), EventSourceConfig(name="seen", features=("item", "gap")))
SURFACES = (EventSourceConfig(name="ml-1m"), EventSourceConfig(name="ml-100k"))


@dataclasses.dataclass(frozen=True)
class World:
    """Rows with labels, and the events of their users by source.

    Args:
        name: ``signals`` or ``surfaces``.
        log: Events; the source is in ``surface``.
        sources: What each source says.
        train: Rows to learn from, in time order.
        test: Test rows by part of the world; all of them later than every training row of that part.
        num_items: Item rows, 0 left for none.
        counters: float32 [E, counter features] by event position.
    """

    name: str
    log: EventLog
    sources: tuple[EventSourceConfig, ...]
    train: Rows
    test: dict[str, Rows]
    num_items: int
    counters: npt.NDArray[np.float32]


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train both forms in both worlds with every seed, then count and time them."""
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + (1 if options.quick else NUM_SEEDS))
    num_train, num_test = (QUICK_ROWS, QUICK_ROWS) if options.quick else (TRAIN_ROWS, TEST_ROWS)
    measurements: list[Measurement] = []
    for world in (signals_world(num_train, num_test), surfaces_world(num_train, num_test)):
        params: dict[str, Param] = {
            "world": world.name,
            "length": LENGTH,
            "train_rows": len(world.train),
            "test_rows": sum(len(rows) for rows in world.test.values()),
            "seeds": len(seeds),
            "quick": options.quick,
        }
        found: dict[tuple[Form, str], list[Metrics]] = {}
        for seed in seeds:
            for form in FORMS:
                reader = Reader(world, form)
                model = fit(world, reader, form, seed)
                for part, rows in world.test.items():
                    found.setdefault((form, part), []).append(evaluate(model, world, reader, rows))
        for (form, part), values in found.items():
            ne = [metrics.ne for metrics in values]
            auc = round(float(np.mean([metrics.auc for metrics in values])), 5)
            measurements.append(
                Measurement(
                    f"ne_{world.name}_{part}_{form}",
                    round(float(np.mean(ne)), 5),
                    "1",
                    quantiles(ne),
                    len(ne),
                    {**params, "auc": auc},
                )
            )
        if world.name == "signals":
            measurements += _costs(world, QUICK_ROUNDS if options.quick else NUM_ROUNDS, options.seed, params)
    return BenchmarkReport(tuple(measurements), OneSeqConfig(sources=SIGNALS, length=LENGTH).digest())


def signals_world(num_train: int, num_test: int) -> World:
    """Return MovieLens-1M with likes and the other ratings as two sources."""
    dataset = load_dataset("ml-1m", load_settings().data_dir, synthetic_fallback=True)
    source = (dataset.log.rating < LIKED_MIN).astype(np.uint8)
    log = dataclasses.replace(dataset.log, surface=source)
    split = dataset.split
    train = split.train.select(slice(max(len(split.train) - num_train, 0), None))
    test = {"all": split.test.select(slice(0, num_test))}
    return World("signals", log, SIGNALS, train, test, int(log.item_id.max()) + 1, streaming_counters(log))


def surfaces_world(num_train: int, num_test: int) -> World:
    """Return the union of both MovieLens sets; each is split by its own time, training runs through both in step."""
    folder = load_settings().data_dir
    large, small = load_dataset("ml-1m", folder), load_dataset("ml-100k", folder)
    columns = EventColumns(
        user_index=np.concatenate([large.log.user_index, small.log.user_index + len(large.users)]),
        item_id=np.concatenate([large.log.item_id, small.log.item_id]),
        rating=np.concatenate([large.log.rating, small.log.rating]),
        timestamp_s=np.concatenate([large.log.timestamp_s, small.log.timestamp_s]),
        surface=np.repeat(np.arange(2, dtype=np.uint8), [len(large.log), len(small.log)]),
    )
    log = EventLog.build(columns, len(large.users) + len(small.users))
    order = log.time_order[log.num_earlier(log.time_order) >= T1_EARLIER_MIN]
    tests: dict[str, Rows] = {}
    places: list[npt.NDArray[np.float64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    for number, source in enumerate(SURFACES):
        own = order[log.surface[order] == number]
        num_own = min(len(own) * 8 // 10, num_train)
        begin = len(own) * 8 // 10 - num_own
        positions.append(own[begin : begin + num_own])
        places.append(np.arange(num_own) / max(num_own, 1))
        tests[source.name] = log.rows(own[len(own) * 9 // 10 :][:num_test])
    in_step = np.argsort(np.concatenate(places), kind="stable")
    train = log.rows(np.concatenate(positions)[in_step])
    return World("surfaces", log, SURFACES, train, tests, int(log.item_id.max()) + 1, streaming_counters(log))


class Reader:
    """Reads the newest events of rows: of all sources together, or of each alone.

    Args:
        world: The events.
        form: Which.
    """

    def __init__(self, world: World, form: Form) -> None:
        num = 1 if form == "merged" else len(world.sources)
        logs = [world.log] if form == "merged" else [of_source(world.log, number) for number in range(num)]
        self._readers = [HistoryReader(log, LENGTH // num, "strict", align="right") for log in logs]

    def read(self, rows: Rows) -> list[HistoryBatch]:
        """Return one batch of histories, or one a source."""
        return [reader.read_at(rows.user_index, rows.timestamp_s) for reader in self._readers]


def of_source(log: EventLog, number: int) -> EventLog:
    """Return the events of one source, as the first and only source of their log."""
    chosen = log.surface == number
    return EventLog.from_sorted(
        user_index=log.user_index[chosen],
        item_id=log.item_id[chosen],
        rating=log.rating[chosen],
        timestamp_s=log.timestamp_s[chosen],
        surface=np.zeros(int(chosen.sum()), np.uint8),
        slot=log.slot[chosen],
        num_users=log.num_users,
    )


class TargetAttention(nn.Module):
    """The candidate asks a sequence; a learned vector stands in where there is none.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.nothing = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, candidate: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return [B, D]: candidate [B, D], tokens [B, L, D], mask bool [B, L]."""
        tokens = torch.cat([self.nothing.expand(len(tokens), -1, -1), tokens], dim=1)
        keys, values = self.key_value(tokens).chunk(2, dim=-1)
        logits = (keys @ self.query(candidate)[:, :, None]).squeeze(2) * candidate.shape[1] ** -0.5
        hidden = functional.pad(mask, (1, 0), value=True)
        weights = logits.masked_fill(~hidden, float("-inf")).softmax(1)
        pooled: Tensor = (weights[:, None] @ values).squeeze(1)
        return pooled


class SmallRanker(nn.Module):
    """A click model over one sequence, or one a source.

    Args:
        world: Sizes and sources.
        form: Which.
    """

    def __init__(self, world: World, form: Form) -> None:
        super().__init__()
        groups = [world.sources] if form == "merged" else [(source,) for source in world.sources]
        num = len(groups)
        configs = [OneSeqConfig(sources=group, length=LENGTH // num, hidden_width=HIDDEN) for group in groups]
        self.items = nn.Parameter(torch.randn(world.num_items, WIDTH) * 0.05)
        self.sequences = nn.ModuleList(OneSeq(config, WIDTH) for config in configs)
        self.attentions = nn.ModuleList(TargetAttention(WIDTH) for _ in configs)
        self.head = nn.Sequential(
            nn.Linear((1 + num) * WIDTH + len(COUNTER_FEATURES), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, items: Tensor, counters: Tensor, sequences: list[tuple[Tensor, ...]]) -> Tensor:
        """Return logits [B]: items int64 [B], counters [B, 3], and item rows, buckets, sources, mask of sequences."""
        candidate = functional.embedding(items, self.items)
        read = []
        for embed, attention, (rows, weights, gaps, sources, mask) in zip(
            self.sequences, self.attentions, sequences, strict=True
        ):
            tokens = embed(functional.embedding(rows, self.items), weights, gaps, sources, mask)
            read.append(attention(candidate, tokens, mask))
        logits: Tensor = self.head(torch.cat([candidate, *read, counters], dim=1)).squeeze(1)
        return logits


def batch_of(world: World, reader: Reader, rows: Rows) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Return the inputs of some rows."""
    sequences = []
    for history in reader.read(rows):
        gaps_s = np.where(history.mask, np.maximum(rows.timestamp_s[:, None] - history.timestamps_s, 0), 0)
        arrays = (history.item_ids, weight_buckets(history.ratings), gap_buckets(gaps_s))
        sources = history.surfaces.astype(np.int64)
        sequences.append(tuple(torch.from_numpy(array) for array in (*arrays, sources, history.mask)))
    counters = torch.from_numpy(world.counters[rows.event_position])
    return torch.from_numpy(rows.item_id), counters, sequences


def fit(world: World, reader: Reader, form: Form, seed: int) -> SmallRanker:
    """Train one form in one pass, in the order of the rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallRanker(world, form)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    for rows in world.train.batches(BATCH_ROWS):
        labels = torch.from_numpy(rows.click.astype(np.float32))
        loss = functional.binary_cross_entropy_with_logits(model(*batch_of(world, reader, rows)), labels)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def evaluate(model: SmallRanker, world: World, reader: Reader, rows: Rows) -> Metrics:
    """Return the quality on some rows."""
    logits = [model(*batch_of(world, reader, part)).numpy() for part in rows.batches(2_048)]
    return Metrics.of(1 / (1 + np.exp(-np.concatenate(logits).astype(np.float64))), rows.click, rows.user_index)


class OperatorCount(TorchDispatchMode):
    """Counts the operators that torch dispatches while it is entered; views are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and go on."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def _costs(world: World, num_rounds: int, seed: int, params: dict[str, Param]) -> list[Measurement]:
    rows = world.test["all"].select(slice(0, BATCH_ROWS))
    calls: dict[str, Callable[[], object]] = {}
    figures: list[Measurement] = []
    for form in FORMS:
        model = SmallRanker(world, form).eval()
        inputs = batch_of(world, Reader(world, form), rows)
        calls[form] = partial(model, *inputs)
        with OperatorCount() as operators:
            model(*inputs)
        with FlopCounterMode(display=False) as flops:
            model(*inputs)
        figures += [
            Measurement(f"operators_{form}", float(operators.count), "1", params=params),
            Measurement(f"flops_{form}", float(flops.get_total_flops()), "FLOP", params=params),
        ]
    samples = interleaved(calls, num_rounds, 3, seed, SystemClock())
    figures += [measure(f"batch_ms_{form}", values, "p50", "ms", **params) for form, values in samples.items()]
    ratio = samples["merged"] / samples["separate"]
    return [*figures, measure("time_ratio_merged_over_separate", ratio, "p50", "x", **params)]
