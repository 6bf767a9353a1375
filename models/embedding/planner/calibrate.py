"""A short measurement of this machine that replaces the cost model's figures for a CPU shard.

Four look-ups of one of two shards that differ in one thing each: one table or several, one row or many, short rows or
long. The differences are the cost of a table, of a row and of a byte; what is left of the smallest is the cost of a
call. Whose rows they are is worked out within the measured time, as a shard does. On one thread, in turn; the lower
quartile counts, since what else the machine does can only add.
"""

from __future__ import annotations

from statistics import quantiles

import numpy as np
import torch

from models.config import TableBackend
from models.embedding.plan import Placed, ShardPlan
from models.embedding.planner.config import CardConfig
from models.embedding.shard_tables import RowIds, Rows, shard_tables
from shared.clock import Clock

NUM_SHARDS = 2
NUM_TABLES = 9
NUM_IDS = 2_000
NUM_ROWS = 16_384
SHORT, LONG = 32, 256
_LEAST = 1e-4


def calibrate(card: CardConfig, clock: Clock, backend: TableBackend = "fbgemm", num_rounds: int = 60) -> CardConfig:
    """Return the card with measured ``call_us``, ``table_us``, ``lookup_us`` and ``read_gb_s``.

    Args:
        card: What is known of the card; its other figures stay.
        clock: Measures.
        backend: How the shard looks up.
        num_rounds: Samples of each look-up, at least 2; the lower quartile counts.
    """
    short, many, long = _Shard(1, SHORT, backend), _Shard(NUM_TABLES, SHORT, backend), _Shard(1, LONG, backend)
    one, several = np.zeros(1, np.int64), np.arange(NUM_SHARDS * NUM_IDS) * (NUM_ROWS // NUM_IDS)
    work = [(short, one), (many, one), (short, several), (long, several)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = _samples(work, clock, num_rounds)
    finally:
        torch.set_num_threads(threads)
    least, with_tables, with_rows, with_bytes = (quantiles(taken, n=4)[0] for taken in samples)
    table_us = max((with_tables - least) / (NUM_TABLES - 1), _LEAST)
    byte_us = max((with_bytes - with_rows) / (NUM_IDS * (LONG - SHORT) * 4), 1e-9)
    lookup_us = max((with_rows - least) / NUM_IDS - byte_us * SHORT * 4, _LEAST)
    measured = {
        "call_us": max(least - table_us, _LEAST),
        "table_us": table_us,
        "lookup_us": lookup_us,
        "read_gb_s": 1e-3 / byte_us,
    }
    return card.model_copy(update={name: float(f"{value:.3g}") for name, value in measured.items()})


class _Shard:
    """Shard 0 of two, with row-wise tables of one width."""

    def __init__(self, num_tables: int, width: int, backend: TableBackend) -> None:
        self._names = [f"t{index}" for index in range(num_tables)]
        self._plan = ShardPlan(NUM_SHARDS, width, {name: Placed("row_wise") for name in self._names})
        rng = np.random.default_rng(0)
        parts = {name: rng.random((NUM_ROWS, width), np.float32) for name in self._names}
        self._gather = shard_tables(parts, backend)

    def lookup(self, rows: RowIds) -> dict[str, Rows]:
        """Read the same rows of every table."""
        return self._gather({name: self._plan.wanted(name, 0, rows) for name in self._names})


def _samples(work: list[tuple[_Shard, RowIds]], clock: Clock, num_rounds: int) -> list[list[float]]:
    """Return microseconds of each look-up, taken in turn so that all share what the machine does meanwhile."""
    samples: list[list[float]] = [[] for _ in work]
    for shard, rows in work:
        shard.lookup(rows)
    for _ in range(num_rounds):
        for taken, (shard, rows) in zip(samples, work, strict=True):
            began_s = clock.monotonic_s()
            shard.lookup(rows)
            taken.append((clock.monotonic_s() - began_s) * 1e6)
    return samples
