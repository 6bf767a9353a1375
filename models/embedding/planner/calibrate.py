"""A short measurement of this machine that replaces the cost model's figures for a CPU shard.

Four look-ups that differ in one thing each: one table or several, one row or many, short rows or long. The differences
are the cost of a table, of a row and of a byte; what is left of the smallest is the cost of a call. Each counts as fast
as it ever was: what else the machine does can only add. On one thread, as a shard runs.
"""

from __future__ import annotations

import numpy as np
import torch

from models.config import TableBackend
from models.embedding.planner.config import CardConfig
from models.embedding.shard_tables import Gather, RowIds, shard_tables
from shared.clock import Clock

NUM_TABLES = 9
NUM_IDS = 2_000
NUM_ROWS = 16_384
SHORT, LONG = 32, 256
_LEAST = 1e-4


def calibrate(card: CardConfig, clock: Clock, backend: TableBackend = "fbgemm", num_rounds: int = 40) -> CardConfig:
    """Return the card with measured ``call_us``, ``table_us``, ``lookup_us`` and ``read_gb_s``.

    Args:
        card: What is known of the card; its other figures stay.
        clock: Measures.
        backend: How the shard looks up.
        num_rounds: Samples of each look-up; the least counts.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, NUM_ROWS, NUM_IDS)
    one = np.zeros(1, np.int64)

    def tables(number: int, width: int) -> Gather:
        rows = {
            f"t{index}": rng.random((NUM_ROWS if number == 1 else 16, width), np.float32) for index in range(number)
        }
        return shard_tables(rows, backend)

    short, many, long = tables(1, SHORT), tables(NUM_TABLES, SHORT), tables(1, LONG)
    few_ids, more_ids = {"t0": one}, {"t0": ids}
    work = [
        (short, few_ids),
        (many, {f"t{index}": one for index in range(NUM_TABLES)}),
        (short, more_ids),
        (long, more_ids),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = _samples(work, clock, num_rounds)
    finally:
        torch.set_num_threads(threads)
    least, with_tables, with_rows, with_bytes = (min(taken) for taken in samples)
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


def _samples(work: list[tuple[Gather, dict[str, RowIds]]], clock: Clock, num_rounds: int) -> list[list[float]]:
    """Return microseconds of each look-up, taken in turn so that all share what the machine does meanwhile."""
    samples: list[list[float]] = [[] for _ in work]
    for gather, wanted in work:
        gather(wanted)
    for _ in range(num_rounds):
        for taken, (gather, wanted) in zip(samples, work, strict=True):
            began_s = clock.monotonic_s()
            gather(wanted)
            taken.append((clock.monotonic_s() - began_s) * 1e6)
    return samples
