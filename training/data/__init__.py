"""Data for training, evaluation and replay: MovieLens, a synthetic log, and the log that both are read from.

``load_dataset`` gives a ``Dataset``; ``HistoryReader`` and ``request_batches`` make batches of its rows;
``held_out_requests`` and ``history_events`` make real requests and the histories they need.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, TypeAlias

from shared.errors import ConfigError, DataUnavailableError
from training.data.batches import RequestBatch, request_batches, request_starts
from training.data.dataset import Catalog, Dataset, Truth, UserTable
from training.data.history import Align, HistoryBatch, HistoryMode, HistoryReader
from training.data.join import HistoryStoreConfig, StoredHistories, stored_histories
from training.data.log import EventColumns, EventLog, Rows
from training.data.movielens import load_movielens
from training.data.replay import HeldOutRequest, UserEvents, held_out_request, held_out_requests, history_events
from training.data.split import Split, split_by_time
from training.data.synthetic import SyntheticChunk, SyntheticConfig, load_synthetic, stream_events

__all__ = [
    "Align",
    "Catalog",
    "Dataset",
    "DatasetName",
    "EventColumns",
    "EventLog",
    "HeldOutRequest",
    "HistoryBatch",
    "HistoryMode",
    "HistoryReader",
    "HistoryStoreConfig",
    "RequestBatch",
    "Rows",
    "Split",
    "StoredHistories",
    "SyntheticChunk",
    "SyntheticConfig",
    "Truth",
    "UserEvents",
    "UserTable",
    "held_out_request",
    "held_out_requests",
    "history_events",
    "load_dataset",
    "load_synthetic",
    "request_batches",
    "request_starts",
    "split_by_time",
    "stored_histories",
    "stream_events",
]

DatasetName: TypeAlias = Literal["ml-1m", "ml-100k", "synthetic"]


def load_dataset(
    name: DatasetName,
    data_dir: Path,
    *,
    seed: int = 0,
    synthetic: SyntheticConfig | None = None,
    synthetic_fallback: bool = False,
) -> Dataset:
    """Load a data set by name.

    Args:
        name: ``ml-1m``, ``ml-100k`` or ``synthetic``.
        data_dir: Where fetched data are kept; the synthetic log needs none.
        seed: Seed of the synthetic log.
        synthetic: Its size and nature, the defaults unless told.
        synthetic_fallback: Give the synthetic log when MovieLens cannot be fetched. ``Dataset.name`` and
            ``Dataset.provenance`` say so, with the reason: show them.

    Raises:
        DataUnavailableError: MovieLens cannot be had and ``synthetic_fallback`` is off.
        ConfigError: there is no data set of that name.
    """
    config = SyntheticConfig() if synthetic is None else synthetic
    if name == "synthetic":
        return load_synthetic(config, seed)
    if name not in ("ml-1m", "ml-100k"):
        raise ConfigError(f"dataset must be ml-1m, ml-100k or synthetic, is {name}", field="dataset", value=name)
    try:
        return load_movielens(name, data_dir)
    except DataUnavailableError as error:
        if not synthetic_fallback:
            raise
        stand_in = load_synthetic(config, seed)
        provenance = f"{stand_in.provenance}, in place of {name}: {error.message}"
        return dataclasses.replace(stand_in, provenance=provenance)
