"""Benchmark ``preprocess``: from the block that a client sent to the features that the shards read, on one core.

1,000 candidates that carry 30 features: decoding, cutting lists to the heaviest ids, hashing, bucketing, the catalog,
de-duplication by table. Beside it the same without carried features, and the parts.
"""

from __future__ import annotations

import os

import numpy as np

from benchmarks.harness import interleaved, measure
from benchmarks.record import Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.services.carrying import NUM_FEATURES, carrying_batch, carrying_config
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import Vocabulary
from models.features import FeatureExtractor
from models.inputs import COUNTER_FEATURES
from shared.clock import SystemClock
from shared.wire import BatchLimits, CandidateBatch, decode_batch, encode_batch

NUM_CANDIDATES = 1_000
NUM_ITEMS = 20_000
NUM_ROUNDS, NUM_WARMUP = 200, 10
QUICK_ROUNDS, QUICK_WARMUP = 5, 1
LIMITS = BatchLimits(candidates_max=2_000, features_max=64, feature_ids_max=200_000)


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure whole requests and their parts in interleaved rounds."""
    rounds, warmup = (QUICK_ROUNDS, QUICK_WARMUP) if options.quick else (NUM_ROUNDS, NUM_WARMUP)
    config = carrying_config()
    extractor = FeatureExtractor(config, *_catalog())
    batch = carrying_batch(NUM_CANDIDATES, options.seed)
    block, bare = encode_batch(batch), encode_batch(CandidateBatch(batch.integers, (), {}))
    decoded = decode_batch(block, LIMITS)
    samples = interleaved(
        {
            "": lambda: extractor.extract(decode_batch(block, LIMITS)),
            "bare_": lambda: extractor.extract(decode_batch(bare, LIMITS)),
            "decode_": lambda: decode_batch(block, LIMITS),
            "extract_": lambda: extractor.extract(decoded),
        },
        rounds, warmup, options.seed, SystemClock(),
    )  # fmt: skip
    params: dict[str, Param] = {
        "candidates": NUM_CANDIDATES, "features": NUM_FEATURES, "block_bytes": len(block), "items": NUM_ITEMS,
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    figures = [measure(f"{name}ms_1000_candidates", values, "p50", "ms", **params) for name, values in samples.items()]
    return BenchmarkReport(tuple(figures), config.digest())


def _catalog() -> tuple[dict[str, Vocabulary], ItemCatalog]:
    """Return items with one genre and one year each; tables of carried features are hashed and need no vocabulary."""
    items = np.arange(1, NUM_ITEMS + 1, dtype=np.int64)
    known = {name: Vocabulary.of(items) for name in ("item", "genre", "year")}
    one = items % 19 + 1
    counters = np.zeros((NUM_ITEMS, len(COUNTER_FEATURES)), np.float32)
    return known, ItemCatalog(items, one, np.arange(NUM_ITEMS + 1), one, one, counters)
