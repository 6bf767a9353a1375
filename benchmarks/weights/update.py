"""Benchmark ``update_in_process``: lookups of one shard while deltas are applied beside them, and without.

Both sides are measured in one run, in interleaved stretches: a reader looks up the rows of one request at a time, at a
fixed pace; a writer thread applies deltas at 20 a second, or does nothing. Transport and dense networks come on top of
this in a mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import measure, quantiles, turns
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.updates import LiveConfig, LiveWeights
from shared.clock import SystemClock
from shared.errors import OverloadedError
from shared.weights.deltas import Delta, RowDelta

KEY: Final = "tables/item/weight"
NUM_ROWS, WIDTH = 1_000_000, 32
ROWS_A_LOOKUP, ROWS_A_DELTA = 1_000, 1_000
UPDATES_PER_S: Final = 20
LOOKUPS_PER_S: Final = 250
STRETCH_S, QUICK_STRETCH_S = 2.0, 0.3
NUM_ROUNDS, QUICK_ROUNDS = 8, 1


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure lookups with 20 updates a second and with none."""
    rng = np.random.default_rng(options.seed)
    table = rng.random((NUM_ROWS, WIDTH), np.float32)
    config = LiveConfig()
    weights = LiveWeights("bench", {KEY: table}, {}, config)
    work = Work(weights, rng)
    stretch_s, rounds = (QUICK_STRETCH_S, QUICK_ROUNDS) if options.quick else (STRETCH_S, NUM_ROUNDS)
    samples: dict[str, list[float]] = {"idle": [], "updates": []}
    bare: list[float] = []
    for turn in turns(list(samples), rounds, 1, options.seed):
        found, plain = work.stretch(stretch_s, table, updating=turn.variant == "updates")
        if turn.counts:
            samples[turn.variant] += found
            bare += plain if turn.variant == "idle" else []
    params: dict[str, Param] = {
        "rows": NUM_ROWS,
        "width": WIDTH,
        "rows_a_lookup": ROWS_A_LOOKUP,
        "rows_a_delta": ROWS_A_DELTA,
        "updates_per_s": UPDATES_PER_S,
        "block_rows": config.block_rows,
    }
    p99 = {name: quantiles(values)["p99"] for name, values in samples.items()}
    p50 = {name: quantiles(values)["p50"] for name, values in (*samples.items(), ("bare", bare))}
    return BenchmarkReport(
        (
            Measurement("lookup_p99_ratio", p99["updates"] / p99["idle"], "x", params=params),
            measure("lookup_ms_idle", samples["idle"], "p99", "ms", **params),
            measure("lookup_ms_updates", samples["updates"], "p99", "ms", **params),
            Measurement("lookup_p50_ratio_to_bare", p50["idle"] / p50["bare"], "x", params=params),
            measure("apply_ms", work.apply_ms, "p99", "ms", **params),
            Measurement("applied", weights.status().applied, "deltas", params=params),
        ),
        config.digest(),
    )


class Work:
    """One reader and one writer.

    Args:
        weights: What they share.
        rng: Draws rows.
    """

    def __init__(self, weights: LiveWeights, rng: np.random.Generator) -> None:
        self._weights = weights
        self._rng = rng
        self._clock = SystemClock()
        self._ids = [np.unique(rng.integers(0, NUM_ROWS, ROWS_A_LOOKUP)) for _ in range(65)]
        self.apply_ms: list[float] = []

    def stretch(
        self, duration_s: float, table: npt.NDArray[np.float32], *, updating: bool
    ) -> tuple[list[float], list[float]]:
        """Look up at a fixed pace for a while, in turns in the live weights and in a plain array.

        Returns:
            Milliseconds a lookup: live, and bare.
        """
        deltas = self._deltas(int(duration_s * UPDATES_PER_S)) if updating else []
        writer = threading.Thread(target=self._write, args=(deltas,))
        writer.start()
        live_ms: list[float] = []
        bare_ms: list[float] = []
        begin_s = self._clock.monotonic_s()
        for number in range(2 * int(duration_s * LOOKUPS_PER_S)):
            self._clock.block_s(begin_s + number / (2 * LOOKUPS_PER_S) - self._clock.monotonic_s())
            ids = self._ids[number % len(self._ids)]
            started_s = self._clock.monotonic_s()
            if number % 2:
                table.take(ids, axis=0)
            else:
                self._weights.state.lookup(KEY, ids)
            (bare_ms if number % 2 else live_ms).append((self._clock.monotonic_s() - started_s) * 1e3)
        writer.join()
        return live_ms, bare_ms

    def _deltas(self, num: int) -> list[Delta]:
        """Make a stretch's deltas ahead: encoding them is the trainer's work."""
        state = self._weights.state
        sequence, crc, deltas = state.sequence, state.crc, list[Delta]()
        for _ in range(num):
            ids = np.unique(self._rng.integers(0, NUM_ROWS, ROWS_A_DELTA))
            values = self._rng.random((len(ids), WIDTH), np.float32)
            sequence += 1
            deltas.append(Delta("bench", sequence, crc, "bench", {KEY: RowDelta(ids, values)}))
            crc = deltas[-1].crc
        return deltas

    def _write(self, deltas: Sequence[Delta]) -> None:
        begin_s = self._clock.monotonic_s()
        for number, delta in enumerate(deltas):
            self._clock.block_s(begin_s + number / UPDATES_PER_S - self._clock.monotonic_s())
            started_s = self._clock.monotonic_s()
            self._apply(delta)
            self.apply_ms.append((self._clock.monotonic_s() - started_s) * 1e3)

    def _apply(self, delta: Delta) -> None:
        """Apply a delta; try again for a second while a reader still holds old blocks."""
        for _ in range(1_000):
            try:
                self._weights.apply(delta)
                return
            except OverloadedError:
                self._clock.block_s(0.001)
        self._weights.apply(delta)
