"""Benchmark ``stations``: what every station computes for one request, in one process, without Ray and without a store.

The sum along the longest path is the floor under the latency of the benchmark ``mesh``. All stations are measured in
interleaved rounds, on the newest published weights, or on random weights of the default size where there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness import interleaved, measure
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RankerConfig
from models.features import FeatureExtractor
from models.random_weights import random_weights
from models.source import WeightSource
from models.stations import CandidateRanker, RequestEncoder, TableShard
from shared.clock import SystemClock
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from shared.settings import load_settings
from shared.weights import WeightStore

NUM_CANDIDATES = 500
NUM_SHARDS = 2
NUM_PRECOMPUTED = 100
NUM_ROUNDS, NUM_WARMUP = 100, 10
QUICK_ROUNDS, QUICK_WARMUP = 5, 2
RANDOM_ITEMS, RANDOM_USERS = 4_000, 6_000
AS_OF_S = 1_000_000_000


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure the compute of every station for 500 candidates and a full history."""
    source = newest_weights(options.seed)
    work = Work.prepare(source, options.seed)
    rounds, warmup = (QUICK_ROUNDS, QUICK_WARMUP) if options.quick else (NUM_ROUNDS, NUM_WARMUP)
    samples = interleaved(work.variants(), rounds, warmup, options.seed, SystemClock())
    params: dict[str, Param] = {
        "candidates": NUM_CANDIDATES,
        "shards": NUM_SHARDS,
        "threads": torch.get_num_threads(),
        "weights": source.version,
    }
    figures = [measure(f"{name}_ms", values, "p50", "ms", **params) for name, values in samples.items()]
    sizes = [Measurement(f"{name}_bytes", size, "B", params=params) for name, size in work.message_bytes().items()]
    return BenchmarkReport((*figures, *sizes), work.config.digest())


def newest_weights(seed: int) -> WeightSource:
    """Return the newest published weights, or random ones of the default size where none are published."""
    store = WeightStore(load_settings().var_dir / "weights")
    if versions := store.versions():
        return store.open(versions[-1])
    return random_weights(RankerConfig(), RANDOM_ITEMS, RANDOM_USERS, seed, "random-default")


@dataclass(frozen=True, slots=True)
class Work:
    """One request at every station.

    Args:
        config: The ranker's configuration.
        extractor: Preprocess.
        shards: Embedding, all shards.
        encoder: Sequence.
        ranker: Ranking and foundation.
        candidates: Item ids of the request.
        history: A full history.
        user: Raw user id.
        features: What preprocess gives.
        rows: What the shards give.
        state: What sequence gives.
    """

    config: RankerConfig
    extractor: FeatureExtractor
    shards: tuple[TableShard, ...]
    encoder: RequestEncoder
    ranker: CandidateRanker
    candidates: list[int | str]
    history: UserHistory
    user: int
    features: FeatureBatch
    rows: tuple[EmbeddingRows, ...]
    state: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]

    @classmethod
    def prepare(cls, source: WeightSource, seed: int) -> Work:
        """Build the stations and one request with known items."""
        config = RankerConfig.model_validate(source.json("model"))
        known = source.tensors("catalog")["item_keys"]
        rng = np.random.default_rng(seed)
        candidates: list[int | str] = [int(key) for key in rng.permutation(known)[:NUM_CANDIDATES]]
        length = config.history_length
        history = UserHistory(
            item_keys=rng.choice(known, length),
            weights=rng.integers(1, 6, length).astype(np.float32),
            timestamps_s=AS_OF_S - 3_600 * np.arange(length, 0, -1),
            num_total=length,
        )
        extractor, encoder = FeatureExtractor.from_weights(source), RequestEncoder.from_weights(source)
        shards = tuple(TableShard(source, shard, NUM_SHARDS) for shard in range(NUM_SHARDS))
        stamp = Stamp("bench", source.version, "bench", "bench", 0.0)
        features = extractor.extract_ids(candidates).stamped(stamp)
        return cls(
            config=config,
            extractor=extractor,
            shards=shards,
            encoder=encoder,
            ranker=CandidateRanker.from_weights(source),
            candidates=candidates,
            history=history,
            user=1,
            features=features,
            rows=tuple(EmbeddingRows(stamp, index, shard.lookup(features)) for index, shard in enumerate(shards)),
            state=encoder.encode(history, 1, "ml-1m", AS_OF_S),
        )

    def variants(self) -> dict[str, Callable[[], object]]:
        """Return what is timed, by station."""
        head = np.arange(min(NUM_PRECOMPUTED, len(self.candidates)), dtype=np.int32)

        def rank(tier: str) -> Callable[[], object]:
            return lambda: self.ranker.rank(self.features, self.state, self.rows, None, tier, 100)

        return {
            "preprocess": lambda: self.extractor.extract_ids(self.candidates),
            "embedding": lambda: [shard.lookup(self.features) for shard in self.shards],
            "sequence": lambda: self.encoder.encode(self.history, self.user, "ml-1m", AS_OF_S),
            **{f"ranking_{tier}": rank(tier) for tier in self.config.tiers},
            "foundation": lambda: self.ranker.embed(self.features, head, self.state, self.rows),
        }

    def message_bytes(self) -> dict[str, int]:
        """Return the sizes of the tensors that travel between stations, bytes."""
        features = self.features
        jagged = sum(ids.values.nbytes + ids.offsets.nbytes for ids in features.features.values())
        unique = sum(rows.nbytes for rows in features.unique_rows.values())
        return {
            "features": jagged + unique + features.candidate_keys.nbytes + features.group_keys.nbytes,
            "rows": sum(array.nbytes for part in self.rows for array in part.rows.values()),
            "state": sum(array.nbytes for array in self.state.values()),
        }
