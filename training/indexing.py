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
from models.inputs import RequestInputs, request_inputs
from models.ranker import CandidateTensors, genre_matrix
from shared.hashing import id_key, id_keys
from training.data import Catalog, Dataset, RequestBatch

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
        item_years: int64 [I], row of table ``year``.
        user_rows: int64 [U, request features], surface left 0.
        surface_rows: int64 [surfaces], row of table ``surface``.
    """

    config: RankerConfig
    vocabularies: dict[str, Vocabulary]
    catalog: ItemCatalog
    item_ids: Ints
    item_rows: Ints
    item_genres: npt.NDArray[np.float32]
    item_years: Ints
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
        catalog = item_catalog(dataset.catalog, vocabularies)
        num_genre_rows = vocabularies["genre"].num_rows
        return cls(
            config=config,
            vocabularies=vocabularies,
            catalog=catalog,
            item_ids=dataset.catalog.item_id,
            item_rows=vocabularies["item"].rows(dataset.catalog.item_id),
            item_genres=genre_matrix(catalog.genre_rows, catalog.genre_offsets, num_genre_rows),
            item_years=catalog.year_rows,
            user_rows=_user_rows(config, dataset, vocabularies),
            surface_rows=vocabularies["surface"].rows(id_keys(dataset.surfaces)),
        )

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table, row 0 included."""
        return {table.name: self.vocabularies[table.name].num_rows for table in self.config.tables}

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
        )

    def groups(self, item_ids: Ints) -> Ints:
        """Return the ad groups of items: int64 [C] item ids of the catalog -> int64 [C]."""
        return self.catalog.group_keys[np.searchsorted(self.item_ids, item_ids)]

    def candidates(self, item_ids: Ints) -> CandidateTensors:
        """Return candidates as tensors: int64 [C] item ids of the catalog."""
        positions = np.searchsorted(self.item_ids, item_ids)
        return CandidateTensors(
            item_rows=torch.from_numpy(self.item_rows[positions]),
            genre_weights=torch.from_numpy(self.item_genres[positions]),
            year_rows=torch.from_numpy(self.item_years[positions]),
        )


def item_catalog(items: Catalog, vocabularies: dict[str, Vocabulary]) -> ItemCatalog:
    """Return a data set's catalog in table rows."""
    name_rows = vocabularies["genre"].rows(id_keys(items.genre_names))
    return ItemCatalog(
        item_keys=items.item_id,
        genre_rows=name_rows[items.genre_values],
        genre_offsets=items.genre_offsets,
        year_rows=vocabularies["year"].rows(items.year.astype(np.int64)),
        group_keys=items.group_id,
    )


def _vocabularies(config: RankerConfig, dataset: Dataset) -> dict[str, Vocabulary]:
    users, items, log = dataset.users, dataset.catalog, dataset.log
    seen = log.timestamp_s < (
        dataset.split.valid.timestamp_s[0] if len(dataset.split.valid) else np.iinfo(np.int64).max
    )
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
