"""DatasetIndex: from the rows of a data set to the table rows that the ranker reads.

Serving makes the same rows from raw ids (``models.features``, ``models.stations``); here they are looked up once for
the whole data set, so that making a batch is array indexing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from models.config import RankerConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.inputs import COUNTER_FEATURES, RequestInputs, counter_features, request_inputs
from models.ranker import CandidateTensors, genre_matrix
from models.request_tables import item_rates
from shared.hashing import id_key, id_keys
from training.data import Dataset, EventLog, RequestBatch, Rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """Table rows of everything in a data set.

    Args:
        config: The ranker's configuration.
        vocabularies: One of each table.
        catalog: Attributes of the items, as they are published.
        item_ids: int64 [I], ascending.
        item_rows: int64 [I], row of table ``item``, 0 for items that no training event names.
        item_genres: float32 [I, genre rows], mean pooling.
        item_rates: float32 [item rows, 2], how likely clicks and conversions are by the published counters: of the
            whole training period, in training too. No row's own label is in them: an item of the history is not the
            candidate, or its earlier event alone is asked.
        item_years: int64 [I], row of table ``year``.
        reads: table -> int64 [rows], how often training events read each row, of the tables that the catalog names.
        event_counters: float32 [E, counter features], of each event's item at its time: earlier seconds only.
        user_rows: int64 [U, request features], surface left 0.
        surface_rows: int64 [surfaces], row of table ``surface``.
    """

    config: RankerConfig
    vocabularies: dict[str, Vocabulary]
    catalog: ItemCatalog
    item_ids: Ints
    item_rows: Ints
    item_genres: npt.NDArray[np.float32]
    item_rates: npt.NDArray[np.float32]
    item_years: Ints
    reads: dict[str, Ints]
    event_counters: npt.NDArray[np.float32]
    user_rows: Ints
    surface_rows: Ints

    @classmethod
    def build(cls, config: RankerConfig, dataset: Dataset, vocabularies: dict[str, Vocabulary] | None = None) -> Self:
        """Number what the data set holds; users and items get a row of their own only if training sees them.

        A row that training never touches would be noise, so such ids share the trained out-of-vocabulary row.

        Args:
            config: The ranker's configuration.
            dataset: The data.
            vocabularies: Those of a published version; None: new ones.
        """
        vocabularies = vocabularies or _vocabularies(config, dataset)
        catalog = item_catalog(dataset, vocabularies)
        num_genre_rows = vocabularies["genre"].num_rows
        item_rows = vocabularies["item"].rows(dataset.catalog.item_id)
        return cls(
            config=config,
            vocabularies=vocabularies,
            catalog=catalog,
            item_ids=dataset.catalog.item_id,
            item_rows=item_rows,
            item_genres=genre_matrix(catalog.genre_rows, catalog.genre_offsets, num_genre_rows),
            item_rates=item_rates(vocabularies["item"], catalog),
            item_years=catalog.year_rows,
            reads=_reads(catalog, item_rows, _seen_events(dataset), vocabularies),
            event_counters=streaming_counters(dataset.log),
            user_rows=_user_rows(config, dataset, vocabularies),
            surface_rows=vocabularies["surface"].rows(id_keys(dataset.surfaces)),
        )

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table, row 0 included."""
        return {table.name: table.num_rows or self.vocabularies[table.name].num_rows for table in self.config.tables}

    def genres_by_row(self) -> npt.NDArray[np.float32]:
        """Return mean pooling of genres by row of table ``item``: float32 [item rows, genre rows]."""
        matrix = np.zeros((self.vocabularies["item"].num_rows, self.item_genres.shape[1]), np.float32)
        known = self.item_rows != OOV_ROW
        matrix[self.item_rows[known]] = self.item_genres[known]
        return matrix

    def requests(self, batch: RequestBatch) -> RequestInputs:
        """Return the request side of a batch."""
        feature_rows = self.user_rows[batch.user_index]
        for column, feature in enumerate(self.config.request_features):
            if feature.name == "surface":
                feature_rows[:, column] = self.surface_rows[batch.surface]
        history = batch.history
        positions = np.minimum(np.searchsorted(self.item_ids, history.item_ids), len(self.item_ids) - 1)
        return request_inputs(
            feature_rows=feature_rows,
            item_rows=self.item_rows[positions],
            weights=history.ratings,
            timestamps_s=history.timestamps_s,
            mask=history.mask,
            num_total=history.num_total,
            as_of_s=batch.timestamp_s,
            num_events=self.config.encoder.num_events,
            window_step=self.config.encoder.window_step,
            item_rates=self.item_rates,
            surprise_half_days=self.config.surprise_half_days,
        )

    def groups(self, item_ids: Ints) -> Ints:
        """Return the ad groups of items: int64 [C] item ids of the catalog -> int64 [C]."""
        return self.catalog.group_keys[np.searchsorted(self.item_ids, item_ids)]

    def candidates(self, rows: Rows, streaming: bool) -> CandidateTensors:
        """Return candidates as tensors.

        Args:
            rows: C rows.
            streaming: Count what each item had at the row's time, as training does; else what the catalog publishes,
                as serving does.
        """
        positions = np.searchsorted(self.item_ids, rows.item_id)
        counters = self.event_counters[rows.event_position] if streaming else self.catalog.counters[positions]
        return CandidateTensors(
            item_rows=torch.from_numpy(self.item_rows[positions]),
            genre_weights=torch.from_numpy(self.item_genres[positions]),
            year_rows=torch.from_numpy(self.item_years[positions]),
            counters=torch.from_numpy(counters),
        )


def item_catalog(dataset: Dataset, vocabularies: dict[str, Vocabulary]) -> ItemCatalog:
    """Return a data set's catalog in table rows, with the counters of the training period."""
    items = dataset.catalog
    events = dataset.log.rows(np.flatnonzero(dataset.log.timestamp_s < _train_end_s(dataset)))
    positions = items.positions(events.item_id)
    counts = [
        np.bincount(positions[hits], minlength=len(items)) for hits in (slice(None), events.click, events.conversion)
    ]
    name_rows = vocabularies["genre"].rows(id_keys(items.genre_names))
    return ItemCatalog(
        item_keys=items.item_id,
        genre_rows=name_rows[items.genre_values],
        genre_offsets=items.genre_offsets,
        year_rows=vocabularies["year"].rows(items.year.astype(np.int64)),
        group_keys=items.group_id,
        counters=counter_features(*counts),
    )


def _seen_events(dataset: Dataset) -> Ints:
    """Return how many training events each item has: int64 [I]."""
    events = dataset.log.rows(np.flatnonzero(dataset.log.timestamp_s < _train_end_s(dataset)))
    return np.bincount(dataset.catalog.positions(events.item_id), minlength=len(dataset.catalog))


def _reads(catalog: ItemCatalog, item_rows: Ints, events: Ints, vocabularies: dict[str, Vocabulary]) -> dict[str, Ints]:
    """Return the reads of each row: an event reads the row of its item, of its year, and of each of its genres."""
    by_genre = np.repeat(events, np.diff(catalog.genre_offsets))
    rows = {"item": (item_rows, events), "year": (catalog.year_rows, events), "genre": (catalog.genre_rows, by_genre)}
    return {
        table: np.bincount(which, weights=count, minlength=vocabularies[table].num_rows).astype(np.int64)
        for table, (which, count) in rows.items()
    }


def streaming_counters(log: EventLog) -> npt.NDArray[np.float32]:
    """Return the counter features of every event's item from events of strictly earlier seconds, any user's.

    Returns:
        float32 [E, counter features], by event position.
    """
    rows = log.rows(np.arange(len(log)))
    order = np.lexsort((rows.timestamp_s, rows.item_id))
    item, time = rows.item_id[order], rows.timestamp_s[order]
    places = np.arange(len(order))
    new_item = np.ones(len(order), np.bool_)
    new_item[1:] = item[1:] != item[:-1]
    new_second = new_item.copy()
    new_second[1:] |= time[1:] != time[:-1]
    item_start = np.maximum.accumulate(np.where(new_item, places, 0))
    second_start = np.maximum.accumulate(np.where(new_second, places, 0))
    counts = [second_start - item_start]
    for hits in (rows.click, rows.conversion):
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(hits[order], dtype=np.int64)])
        counts.append(before[second_start] - before[item_start])
    counters = np.empty((len(order), len(COUNTER_FEATURES)), np.float32)
    counters[order] = counter_features(*counts)
    return counters


def _train_end_s(dataset: Dataset) -> int:
    """Return the time from on which training must know nothing."""
    return int(dataset.split.valid.timestamp_s[0]) if len(dataset.split.valid) else np.iinfo(np.int64).max


def _vocabularies(config: RankerConfig, dataset: Dataset) -> dict[str, Vocabulary]:
    users, items, log = dataset.users, dataset.catalog, dataset.log
    seen = log.timestamp_s < _train_end_s(dataset)
    keys: dict[str, Ints] = {
        "item": np.unique(log.item_id[seen]),
        "user": users.user_id[np.unique(log.user_index[seen])],
        "genre": id_keys([name for name in items.genre_names if name]),
        "year": np.unique(items.year[items.year > 0]).astype(np.int64),
        "surface": id_keys(dataset.surfaces),
    }
    profiles = [users.profile(index) for index in range(len(users))]
    for feature in config.request_features:
        if feature.table not in keys:
            values = {profile[feature.name][: feature.prefix_length] for profile in profiles} - {""}
            keys[feature.table] = id_keys(sorted(values))
    keys |= {table.name: np.zeros(0, np.int64) for table in config.tables if table.name not in keys}
    return {name: Vocabulary.of(of_table) for name, of_table in keys.items()}


def _user_rows(config: RankerConfig, dataset: Dataset, vocabularies: dict[str, Vocabulary]) -> Ints:
    users = dataset.users
    profiles = [users.profile(index) for index in range(len(users))]
    rows = np.zeros((len(users), len(config.request_features)), np.int64)
    for column, feature in enumerate(config.request_features):
        if feature.name == "user_id":
            rows[:, column] = vocabularies[feature.table].rows(users.user_id)
        elif feature.name != "surface":
            values = [profile[feature.name][: feature.prefix_length] for profile in profiles]
            keys = np.fromiter((id_key(value) for value in values), np.int64, len(values))
            rows[:, column] = vocabularies[feature.table].rows(keys)
    return rows
