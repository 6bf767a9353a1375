"""Benchmark ``wire``: bytes and client time of a rank request as columns and as JSON, 1,000 candidates, 30 features.

The columns are those that the mesh takes with ``Content-Encoding: zstd``; JSON is what it takes without, one map a
candidate, written by the fastest encoder there is (orjson) from ready-made maps: whatever a client does to make them is
not counted against JSON. Beside it: the standard library's encoder, JSON with names once (columns as JSON lists), and
all of them compressed alike. ``decode_ms`` is the server's side.
"""

from __future__ import annotations

import json
import os
from typing import Any

import orjson
import zstandard

from benchmarks.harness import interleaved, measure
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.services.carrying import NUM_FEATURES, carrying_batch, carrying_config, carrying_rows
from shared.clock import SystemClock
from shared.wire import BatchLimits, CandidateBatch, IdLists, decode_batch, encode_request, split_request
from shared.wire.client import ZSTD_LEVEL

NUM_CANDIDATES = 1_000
NUM_ROUNDS, NUM_WARMUP = 30, 3
QUICK_ROUNDS, QUICK_WARMUP = 5, 1
FIELDS: dict[str, Any] = {"user_id": 6040, "surface": "feed", "limit": 50, "deadline_ms": 200}
LIMITS = BatchLimits(candidates_max=2_000, features_max=64, feature_ids_max=200_000)


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure size and time of each form in interleaved rounds."""
    rounds, warmup = (QUICK_ROUNDS, QUICK_WARMUP) if options.quick else (NUM_ROUNDS, NUM_WARMUP)
    batch = carrying_batch(NUM_CANDIDATES, options.seed)
    rows = FIELDS | {"candidates": batch.ids, "features": carrying_rows(batch)}
    zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    columns = encode_request(FIELDS, batch)
    bodies = {"columns": columns, "json": orjson.dumps(rows), "json_columns": orjson.dumps(_as_lists(batch))}
    _, block = split_request(columns)
    samples = interleaved(
        {
            "columns_zstd": lambda: zstd.compress(encode_request(FIELDS, batch)),
            "columns": lambda: encode_request(FIELDS, batch),
            "json": lambda: orjson.dumps(rows),
            "stdlib_json": lambda: json.dumps(rows, separators=(",", ":")),
            "decode": lambda: decode_batch(block, LIMITS),
        },
        rounds, warmup, options.seed, SystemClock(),
    )  # fmt: skip
    params: dict[str, Param] = {
        "candidates": NUM_CANDIDATES, "features": NUM_FEATURES, "zstd_level": ZSTD_LEVEL,
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    small = {name: len(zstd.compress(body)) for name, body in bodies.items()}
    ratios = {
        "bytes_ratio_json": len(bodies["json"]) / small["columns"],
        "bytes_ratio_json_plain": len(bodies["json"]) / len(columns),
        "bytes_ratio_json_both_zstd": small["json"] / small["columns"],
        "bytes_ratio_json_columns": len(bodies["json_columns"]) / small["columns"],
    }
    figures = [
        measure("encode_time_ratio_json", samples["json"] / samples["columns_zstd"], "p50", "1", **params),
        measure("encode_time_ratio_json_plain", samples["json"] / samples["columns"], "p50", "1", **params),
        measure(
            "encode_time_ratio_json_stdlib", samples["stdlib_json"] / samples["columns_zstd"], "p50", "1", **params
        ),
        *(measure(f"{name}_ms", values, "p50", "ms", **params) for name, values in samples.items()),
    ]
    sizes = [Measurement(name, round(value, 3), "1", params=params) for name, value in ratios.items()]
    sizes += [Measurement(f"{name}_bytes", len(body), "B", params=params) for name, body in bodies.items()]
    sizes += [Measurement(f"{name}_zstd_bytes", size, "B", params=params) for name, size in small.items()]
    return BenchmarkReport((*sizes, *figures), carrying_config().digest())


def _as_lists(batch: CandidateBatch) -> dict[str, Any]:
    """Return the columns as JSON would hold them: names once, one list a column."""
    features: dict[str, Any] = {}
    for name, column in batch.features.items():
        if isinstance(column, IdLists):
            features[name] = {"offsets": column.offsets.tolist(), "ids": column.ids.tolist()}
            if column.weights is not None:
                features[name]["weights"] = [round(weight, 3) for weight in column.weights.tolist()]
        else:
            features[name] = [round(value, 4) for value in column.values.tolist()]
    return FIELDS | {"candidates": batch.ids, "features": features}
