"""The rows that the request-only path reads: attributes of the request, and the items of a history as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.arrays import ROWS_MULTIPLE, tensor_view
from models.config import RankerConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.tables import table_weight
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.inputs import COUNTER_FEATURES, rates
from models.ranker import event_table, genre_matrix
from models.source import WeightSource

RowIds: TypeAlias = npt.NDArray[np.int64]
RowLookup: TypeAlias = Callable[[str, RowIds], npt.NDArray[np.float32]]
"""Table and rows int64 [N] -> float32 [N, D], of one state of the weights."""


class RequestTables:
    """Which genres each item has, and how rows become events; the rows themselves come from outside.

    Rows change with every update of the weights, so nothing is derived from them ahead: an event is its item's row and
    the mean of its genres' rows, pooled when it is read.

    Args:
        source: The weights; only their catalog is kept.
        config: The ranker's configuration.
        items: Vocabulary of table ``item``.

    Attributes:
        item_rates: float32 [item rows, 2], see ``item_rates``.
    """

    def __init__(self, source: WeightSource, config: RankerConfig, items: Vocabulary) -> None:
        self._config = config
        catalog = ItemCatalog.from_weights(source)
        # Columns end at the last genre that an item has: rows of the table beyond it change no event.
        self._num_genres = int(catalog.genre_rows.max(initial=0)) + 1
        self._genres = tensor_view(item_genre_matrix(items, catalog, items.num_rows, self._num_genres))
        self.item_rates = item_rates(items, catalog)

    def features(self, feature_rows: RowIds, lookup: RowLookup) -> Tensor:
        """Return attributes of requests: int64 [B, F] -> [B, F, D]."""
        names = [feature.table for feature in self._config.request_features]
        parts = [tensor_view(lookup(name, feature_rows[:, index])) for index, name in enumerate(names)]
        return torch.stack(parts, dim=1)

    def events(self, item_rows: RowIds, lookup: RowLookup) -> Tensor:
        """Return what items embed to as events: int64 [1, L] -> [1, L, D]."""
        rows = item_rows[0]
        padded = np.zeros(len(rows) + -len(rows) % ROWS_MULTIPLE, np.int64)
        padded[: len(rows)] = rows
        items = tensor_view(lookup("item", padded))
        genres = tensor_view(lookup("genre", np.arange(self._num_genres)))
        return event_table(self._config, items, self._genres[tensor_view(padded)], genres)[None, : len(rows)]

    def taste(self, item_rows: RowIds, weights: npt.NDArray[np.float32], lookup: RowLookup) -> Tensor:
        """Return the sum of what items embed to as events: int64 [1, W], by float32 [1, W] -> [1, D]."""
        return (tensor_view(weights)[:, :, None] * self.events(item_rows, lookup)).sum(1)


def published_rows(source: WeightSource, config: RankerConfig) -> RowLookup:
    """Return the look-up of a version's tables as they were published, mapped from its files."""
    used = dict.fromkeys(["item", "genre", *(feature.table for feature in config.request_features)])
    weights = {name: table_weight(source, name) for name in used}
    return lambda table, rows: weights[table].take(rows, axis=0)


def item_rates(items: Vocabulary, catalog: ItemCatalog) -> npt.NDArray[np.float32]:
    """Return how likely a click and a conversion of each row of table ``item`` is: float32 [item rows, 2].

    They are those of the published counters. Row 0, of items without one, has even odds, as an item without events has.
    """
    rows = items.rows(catalog.item_keys)
    counters = np.zeros((items.num_rows, len(COUNTER_FEATURES)), np.float32)
    counters[rows[rows != OOV_ROW]] = catalog.counters[rows != OOV_ROW]
    return rates(counters)


def item_genre_matrix(
    items: Vocabulary, catalog: ItemCatalog, num_item_rows: int, num_genre_rows: int
) -> npt.NDArray[np.float32]:
    """Return mean pooling of genres by item row: float32 [num_item_rows, num_genre_rows]."""
    matrix = np.zeros((num_item_rows, num_genre_rows), np.float32)
    rows = items.rows(catalog.item_keys)
    known = rows != OOV_ROW
    matrix[rows[known]] = genre_matrix(catalog.genre_rows, catalog.genre_offsets, num_genre_rows)[known]
    return matrix
