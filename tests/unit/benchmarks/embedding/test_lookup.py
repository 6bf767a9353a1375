"""The look-up comparison compares the same rows, and says so for every row type."""

from __future__ import annotations

import numpy as np

from benchmarks.embedding import lookup
from benchmarks.harness import interleaved
from benchmarks.registry import BENCHMARKS
from shared.clock import SystemClock


def test_bare_call_shard_and_service_read_the_same_rows() -> None:
    source = lookup.made_up_tables(500, "int8", 0)
    features = lookup.made_up_request(source, 60, 0)
    variants, num_rows = lookup.pair(source, features)
    unique = features.unique_rows
    assert num_rows == int((unique["item"] % 2 == 0).sum()) + len(unique["genre"])
    samples = interleaved(variants, 3, 1, 0, SystemClock())
    found = {one.metric for one in lookup._figures(samples, "int8", 60, 500, num_rows)}
    assert found >= set(BENCHMARKS["lookup"].metrics)
    assert all(np.isfinite(values).all() for values in samples.values())
