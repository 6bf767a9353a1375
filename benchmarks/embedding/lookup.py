"""Benchmark ``lookup``: what a shard's service costs beside the bare FBGEMM call on the same ids.

One shard of two, one thread, one process, a batch of one request: its distinct rows as every shard sees them. The bare
call is FBGEMM's inference module with this shard's ids ready as 32-bit tensors; the service starts from the message
that it receives and ends with the one that it sends: ownership, bounds, look-up, deadline, version, metrics. ``live``
is the shard whose rows may be updated while it serves, after an update that moved a tenth of them. All in one run, in
turn, so the ratio holds on a busy machine; the microseconds do not.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from benchmarks.harness import interleaved, measure
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RankerConfig, RowType, TableConfig
from models.embedding.plan import ShardPlan
from models.embedding.planner import CardConfig, PlanTable
from models.embedding.planner.calibrate import calibrate
from models.embedding.planner.cost import loads
from models.embedding.serving_rows import stored_rows, with_serving_rows
from models.embedding.shard_tables import fbgemm_tables
from models.embedding.table_shard import TableShard
from models.source import MemorySource
from models.updates import LiveConfig
from models.updates.shard import LiveTableShard
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService, ShardRows
from shared.clock import SystemClock
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.weights.deltas import Delta, RowDelta, tensor_key
from shared.weights.held import OneVersion

NUM_SHARDS = 2
NUM_ITEMS = 1_000_000
QUICK_ITEMS = 20_000
NUM_GENRES, NUM_YEARS = 20, 80
CANDIDATES = (500, 2_000)
ROW_TYPES: tuple[RowType, ...] = ("fp32", "fp16", "int8", "int4")
NUM_ROUNDS, NUM_WARMUP = 400, 20
QUICK_ROUNDS, QUICK_WARMUP = 10, 2
UPDATED_ROWS = LiveConfig().block_rows * NUM_SHARDS
"""Rows of the whole table that make up one block of a shard."""


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure every row type at every number of candidates."""
    num_items = QUICK_ITEMS if options.quick else NUM_ITEMS
    rounds, warmup = (QUICK_ROUNDS, QUICK_WARMUP) if options.quick else (NUM_ROUNDS, NUM_WARMUP)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measurements: list[Measurement] = []
    # No link in one process: bandwidths that the look-up does not use cost nothing here.
    card = calibrate(CardConfig(memory_gb=1, read_gb_s=1, link_gb_s=1e9, load_gb_s=1), SystemClock())
    try:
        for row_type in ROW_TYPES:
            source = made_up_tables(num_items, row_type, options.seed)
            for num_candidates in CANDIDATES:
                features = made_up_request(source, num_candidates, options.seed)
                variants, num_rows = pair(source, features)
                samples = interleaved(variants, rounds, warmup, options.seed, SystemClock())
                plan_us = planned_us(card, features, row_type, num_items)
                measurements += _figures(samples, row_type, num_candidates, num_items, num_rows, plan_us)
    finally:
        torch.set_num_threads(threads)
    return BenchmarkReport(tuple(measurements), RankerConfig().digest())


def made_up_tables(num_items: int, row_type: RowType, seed: int) -> MemorySource:
    """Return weights with nothing but the candidate-side tables of the default model, random."""
    default = RankerConfig()
    tables = tuple(
        TableConfig(name=table.name, placement=table.placement, row_type=row_type) for table in default.tables
    )
    config = default.model_copy(update={"tables": tables})
    rng = np.random.default_rng(seed)
    sizes = {"item": num_items, "genre": NUM_GENRES, "year": NUM_YEARS}
    groups = {
        f"tables/{name}": {"weight": rng.standard_normal((rows, config.width), np.float32)}
        for name, rows in sizes.items()
    }
    return with_serving_rows(MemorySource("made-up", groups, {"model": config.model_dump(mode="json")}))


def made_up_request(source: MemorySource, num_candidates: int, seed: int) -> FeatureBatch:
    """Return a request's distinct rows; what the shards do not read is left empty."""
    rng = np.random.default_rng((seed, num_candidates))
    num_items = len(source.groups["tables/item"]["weight"])
    unique = {
        "item": np.unique(rng.integers(0, num_items, num_candidates)),
        "genre": np.arange(NUM_GENRES),
        "year": np.arange(NUM_YEARS),
    }
    keys = np.zeros(num_candidates, np.int64)
    stamp = Stamp("bench", source.version, "bench", "bench", 0.0)
    return FeatureBatch(stamp, keys, keys, unique, {}, np.zeros((num_candidates, 0), np.float32), {})


def pair(source: MemorySource, features: FeatureBatch) -> tuple[dict[str, Callable[[], object]], int]:
    """Return the bare call, the shard, the live shard and the service on the same rows, and how many rows that is.

    Raises:
        ValueError: they do not give the same bits: then there is nothing to compare.
    """
    config = RankerConfig.model_validate(source.json("model"))
    shard = TableShard(source, 0, NUM_SHARDS, "fbgemm")
    names = shard.plan.tables_of(0)
    module = fbgemm_tables({name: shard.plan.part(name, 0, stored_rows(source, config, name)) for name in names})
    wanted = [shard.plan.wanted(name, 0, features.unique_rows[name]) for name in names]
    ids = torch.from_numpy(np.concatenate(wanted).astype(np.int32))
    offsets = torch.from_numpy(np.cumsum([0, *map(len, wanted)], dtype=np.int32))
    service = EmbeddingService(
        EmbeddingConfig(shard=0, num_shards=NUM_SHARDS),
        OneVersion[ShardRows](source.version, shard),
        SystemClock(),
        "bench",
    )
    live = updated_shard(source)
    expected = module(ids, offsets).numpy()
    for rows in (_result(service.lookup(features, 1_000.0)).rows, live.lookup(features)):
        if not np.array_equal(np.concatenate(list(rows.values())), expected):
            raise ValueError("service, live shard and bare call must give the same rows, differ")
    variants: dict[str, Callable[[], object]] = {
        "bare": lambda: module(ids, offsets),
        "shard": lambda: shard.lookup(features),
        "live": lambda: live.lookup(features),
        "service": lambda: _result(service.lookup(features, 1_000.0)),
    }
    return variants, len(ids)


def updated_shard(source: MemorySource) -> LiveTableShard:
    """Return shard 0 after an update that wrote every tenth block of the items again: those blocks lie elsewhere."""
    shard = LiveTableShard(source, 0, NUM_SHARDS, backend="fbgemm")
    rows: dict[str, RowDelta] = {}
    for group in ("tables/item", "rows/item"):
        for name, values in source.groups.get(group, {}).items():
            ids = np.arange(len(values))
            ids = ids[ids // UPDATED_ROWS % 10 == 0]
            rows[tensor_key(group, name)] = RowDelta(ids, values[ids])
    shard.weights.apply(Delta(source.version, 1, 0, "", rows))
    return shard


def planned_us(card: CardConfig, features: FeatureBatch, row_type: RowType, num_items: int) -> float:
    """Return what the planner's cost model says of the same request on shard 0, microseconds."""
    sizes = {"item": num_items, "genre": NUM_GENRES, "year": NUM_YEARS}
    plan = ShardPlan.of(RankerConfig(), NUM_SHARDS)
    total = card.call_us
    for name, placed in plan.placed.items():
        ids = len(features.unique_rows[name])
        table = PlanTable(name=name, rows=sizes[name], width=plan.width, row_type=row_type, ids=ids, zipf=0.0)
        total += loads(table, placed.kind, NUM_SHARDS, placed.owner)[0].time_us(card)
    return total


def _figures(
    samples: dict[str, Any], row_type: RowType, num_candidates: int, num_items: int, num_rows: int, plan_us: float
) -> list[Measurement]:
    params: dict[str, Param] = {
        "row_type": row_type,
        "candidates": num_candidates,
        "rows": num_rows,
        "items": num_items,
        "shards": NUM_SHARDS,
        "threads": 1,
    }
    ratios = {name: samples[name] / samples["bare"] for name in ("shard", "live", "service")}
    micros = {name: values * 1e3 for name, values in samples.items()}
    return [
        measure("time_ratio_to_bare", ratios["service"], "p50", "ratio", **params),
        measure("shard_ratio_to_bare", ratios["shard"], "p50", "ratio", **params),
        measure("live_ratio_to_bare", ratios["live"], "p50", "ratio", **params),
        *(measure(f"{name}_us", values, "p50", "us", **params) for name, values in micros.items()),
        # A cost model is to rank placements: a factor of two is near enough for that.
        measure("planned_ratio_to_shard", plan_us / micros["shard"], "p50", "ratio", **params),
        measure("rows_s", num_rows / (samples["service"] / 1e3), "p50", "rows/s", **params),
    ]


def _result(work: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine gives that never waits, without an event loop to pay for."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise ValueError("the look-up must not wait")
