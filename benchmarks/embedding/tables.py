"""Benchmark ``tables``: what a byte of embedding table is worth under each scheme, on MovieLens-1M.

The comparison of the paper on unified embeddings (arXiv 2305.12102), at 1.0, 0.5 and 0.1 of the bytes that a row for
every id takes: separate hashed tables sized in proportion to ids, the same sized by the allocator, and one table that
all features share. Then what the rows of a trained table lose in fewer bits. The labels are derived from ratings and
the split is random, which leaks the future: the figures compare schemes, they are not what a served ranker reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.embedding.dcn import Fitted, fit, predict
from benchmarks.embedding.movielens_ids import FEATURES, IdSamples, load_samples
from benchmarks.embedding.schemes import Scheme, collisionless, multiplexed, separate, sizes
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from models.config import RowType
from models.embedding.quantized import StoredRows
from shared.config import Config
from shared.settings import load_settings
from training.metrics import Metrics

ROW_TYPES: tuple[RowType, ...] = ("fp32", "fp16", "int8", "int4")
QUICK_ROWS = 20_000


class TablesConfig(Config):
    """What is compared.

    Args:
        budgets: Bytes as shares of those of a row for every id.
        chunks: Chunks of a feature in the shared table.
        num_epochs: Epochs of training; the best on the validation rows counts.
    """

    budgets: tuple[float, ...] = (1.0, 0.5, 0.1)
    chunks: tuple[int, ...] = (1, 3)
    num_epochs: int = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheme at one budget.

    Args:
        name: ``collisionless``, ``separate``, ``allocated`` or ``multiplexed``.
        budget: Share of the bytes.
        chunks: Rows that make one feature's embedding.
    """

    name: str
    budget: float
    chunks: int = 1

    def scheme(self, samples: IdSamples) -> Scheme:
        """Lay the features of the samples out."""
        if self.name == "collisionless":
            return collisionless(samples)
        if self.name == "multiplexed":
            return multiplexed(samples, self.budget, self.chunks)
        # Every row of the log reads each feature once: all weigh the same.
        weights = [1.0] * len(FEATURES) if self.name == "allocated" else None
        return separate(samples, sizes(samples, self.budget, weights))


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Train every scheme at every budget."""
    config = TablesConfig(num_epochs=1, budgets=(0.1,)) if options.quick else TablesConfig()
    samples = load_samples(load_settings().data_dir, options.seed, QUICK_ROWS if options.quick else None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are too small for more
    try:
        measurements = measure_cells(samples, config, options.seed, quick=options.quick)
    finally:
        torch.set_num_threads(threads)
    return BenchmarkReport(tuple(measurements), config.digest())


def cells(config: TablesConfig) -> list[Cell]:
    """Return the schemes, largest budget first; sizes at the full budget are the number of ids whoever chooses them."""
    found = [Cell("collisionless", 1.0)]
    for budget in config.budgets:
        found.append(Cell("separate", budget))
        if budget < 1.0:
            found.append(Cell("allocated", budget))
        found += [Cell("multiplexed", budget, chunks) for chunks in config.chunks]
    return found


def measure_cells(samples: IdSamples, config: TablesConfig, seed: int, *, quick: bool = False) -> list[Measurement]:
    """Train each cell and return its AUC, what it gains over separate tables, and the figures of fewer bits."""
    auc: dict[Cell, float] = {}
    measurements: list[Measurement] = []
    rows_test = len(samples.test)
    for cell in cells(config):
        scheme = cell.scheme(samples)
        fitted = fit(samples, scheme.rows, scheme.num_rows, scheme.width, config.num_epochs, seed)
        auc[cell] = fitted.test_auc
        params: dict[str, Param] = {
            "scheme": cell.name,
            "budget": cell.budget,
            "chunks": cell.chunks,
            "table_bytes": scheme.table_bytes,
            "epoch": fitted.epoch,
            "quick": quick,
        }
        measurements.append(Measurement("auc", round(fitted.test_auc, 4), "auc", num_samples=rows_test, params=params))
        if cell.name == "collisionless":
            measurements += _fewer_bits(samples, scheme, fitted)
    for cell, value in auc.items():
        base = auc.get(Cell("separate", cell.budget))
        if cell.name in ("allocated", "multiplexed") and base is not None:
            params = {"budget": cell.budget, "chunks": cell.chunks, "quick": quick}
            gain = round(100 * (value - base), 2)
            measurements.append(Measurement(f"gain_{cell.name}", gain, "auc points", params=params))
    return measurements


def _fewer_bits(samples: IdSamples, scheme: Scheme, fitted: Fitted) -> list[Measurement]:
    """Return bytes, error, AUC and NE of a trained table by row type."""
    weight = fitted.network.table.detach().numpy().copy()
    labels = samples.labels[samples.test] > 0.5
    users = samples.ids[samples.test, 0]
    found = []
    for row_type in ROW_TYPES:
        stored = StoredRows.of(weight, row_type)
        values = stored.read(np.arange(len(stored)))
        fitted.network.table.data = torch.from_numpy(values)
        chance = 1.0 / (1.0 + np.exp(-predict(fitted.network, scheme.rows[samples.test]).astype(np.float64)))
        quality = Metrics.of(chance, labels, users)
        error = float(np.linalg.norm(values - weight) / np.linalg.norm(weight))
        params: dict[str, Param] = {"row_type": row_type, "row_bytes": stored.num_bytes // len(stored)}
        found += [
            Measurement("rows_bytes", stored.num_bytes, "B", params=params),
            Measurement("rows_error", float(f"{error:.3g}"), "relative", params=params),
            Measurement("rows_auc", round(quality.auc, 4), "auc", num_samples=len(labels), params=params),
            Measurement("rows_ne", round(quality.ne, 4), "ne", num_samples=len(labels), params=params),
        ]
    fitted.network.table.data = torch.from_numpy(weight)
    return found
