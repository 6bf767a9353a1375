"""Benchmark ``preprocess``: from the block that a client sent to the features that the shards read, on one core.

1,000 candidates that carry 30 features: decoding, cutting lists to the heaviest ids, hashing, bucketing, the catalog,
de-duplication by table. Beside it the same without carried features, and the parts.
"""

from __future__ import annotations

from benchmarks.harness import interleaved, measure
from benchmarks.record import Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.services.carrying import NUM_FEATURES, carrying_batch, carrying_config
from models.features import FeatureExtractor
from models.random_weights import random_weights
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
    source = random_weights(config, num_items=NUM_ITEMS, seed=options.seed, golden=False)
    extractor = FeatureExtractor.from_weights(source)
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
    params: dict[str, Param] = {"candidates": NUM_CANDIDATES, "features": NUM_FEATURES, "block_bytes": len(block)}
    figures = [measure(f"{name}ms_1000_candidates", values, "p50", "ms", **params) for name, values in samples.items()]
    return BenchmarkReport(tuple(figures), config.digest())
