"""The look-up comparison compares the same rows, and says so for every row type."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.embedding import lookup
from benchmarks.harness import interleaved
from benchmarks.registry import BENCHMARKS
from models.embedding.planner import CardConfig
from shared.clock import SystemClock


def test_bare_call_shard_and_service_read_the_same_rows() -> None:
    source = lookup.made_up_tables(500, "int8", 0)
    features = lookup.made_up_request(source, 60, 0)
    variants, num_rows = lookup.pair(source, features)
    unique = features.unique_rows
    assert num_rows == int((unique["item"] % 2 == 0).sum()) + len(unique["genre"])
    card = CardConfig(memory_gb=1, read_gb_s=10, link_gb_s=1e9, load_gb_s=1)
    plan_us = lookup.planned_us(card, features, "int8", 500)
    read_us = num_rows * (card.lookup_us + 36 / 10e3)
    assert plan_us == pytest.approx(card.call_us + 2 * card.table_us + read_us, rel=0.02)
    samples = interleaved(variants, 3, 1, 0, SystemClock())
    found = {one.metric for one in lookup._figures(samples, "int8", 60, 500, num_rows, plan_us)}
    assert found >= set(BENCHMARKS["lookup"].metrics)
    assert all(np.isfinite(values).all() for values in samples.values())
