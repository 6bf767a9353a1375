"""FeatureExtractor: raw candidate ids -> table rows, the half of the ranker that preprocess runs. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.carried import CarriedRows, Jagged, prefer
from models.config import RankerConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import Vocabulary
from models.source import WeightSource
from shared.hashing import EntityId
from shared.schema.features import FeatureBatch, JaggedIds
from shared.schema.stamp import Stamp
from shared.wire import CandidateBatch

_MARKS_MAX = 4 * 2**20
"""Tables with more rows than this are de-duplicated by sorting: marks of 16 MiB at most."""


@dataclass(frozen=True, slots=True)
class CandidateFeatures:
    """A ``FeatureBatch`` without its stamp; see there for the fields."""

    candidate_keys: npt.NDArray[np.int64]
    group_keys: npt.NDArray[np.int64]
    unique_rows: dict[str, npt.NDArray[np.int64]]
    features: dict[str, JaggedIds]
    dense: npt.NDArray[np.float32]
    num_oov: dict[str, int]

    def stamped(self, stamp: Stamp) -> FeatureBatch:
        """Return the message that travels."""
        return FeatureBatch(
            stamp=stamp,
            candidate_keys=self.candidate_keys,
            group_keys=self.group_keys,
            unique_rows=self.unique_rows,
            features=self.features,
            dense=self.dense,
            num_oov=self.num_oov,
        )


class FeatureExtractor:
    """Maps candidates to rows; for one thread.

    Args:
        config: The ranker's configuration.
        vocabularies: Of the candidate-side tables that have one.
        catalog: Attributes of items.
    """

    def __init__(self, config: RankerConfig, vocabularies: Mapping[str, Vocabulary], catalog: ItemCatalog) -> None:
        self._config = config
        self._items = vocabularies["item"]
        self._catalog = catalog
        self._carried = CarriedRows(config, vocabularies)
        self._distinct = _Distinct()

    @classmethod
    def from_weights(cls, source: WeightSource) -> Self:
        """Read configuration, vocabularies and catalog of a weights version."""
        config = RankerConfig.model_validate(source.json("model"))
        names = {"item", *(name for name in config.candidate_tables if config.table(name).num_rows is None)}
        vocabularies = {name: Vocabulary.from_weights(source, name) for name in names}
        return cls(config, vocabularies, ItemCatalog.from_weights(source))

    def extract_ids(self, candidates: Sequence[EntityId]) -> CandidateFeatures:
        """Return the candidate side of C raw ids that carry nothing."""
        return self.extract(CandidateBatch.of(candidates))

    def extract(self, batch: CandidateBatch) -> CandidateFeatures:
        """Return the candidate side of a request; ids out of vocabulary get row 0 and are counted.

        Raises:
            InvalidRequestError: the candidates carry what the model does not take.
        """
        keys = batch.keys
        attributes = self._catalog.attributes(keys)
        single = np.arange(len(keys) + 1, dtype=np.int64)
        known: dict[str, Jagged] = {
            "item_id": (self._items.rows(keys), single),
            "genres": (attributes.genre_rows, attributes.genre_offsets),
            "year": (attributes.year_rows, single),
        }
        carried = self._carried.rows(batch)
        jagged = known | {name: prefer(own, known[name]) if name in known else own for name, own in carried.items()}
        features = self._config.candidate_features
        unique_rows, positions = self._distinct.by_table(
            [feature.table for feature in features], [jagged[feature.name][0] for feature in features]
        )
        return CandidateFeatures(
            candidate_keys=keys,
            group_keys=attributes.group_keys,
            unique_rows=unique_rows,
            features={
                feature.name: JaggedIds(ids, jagged[feature.name][1].astype(np.int32))
                for feature, ids in zip(features, positions, strict=True)
            },
            dense=attributes.counters,
            num_oov={  # what is out of vocabulary is row 0
                feature.name: len(jagged[feature.name][0]) - int(np.count_nonzero(jagged[feature.name][0]))
                for feature in features
            },
        )


class _Distinct:
    """De-duplicates rows, without sorting where the tables are not too large for it."""

    def __init__(self) -> None:
        self._marks = np.zeros(0, np.int32)
        self._places = np.zeros(0, np.int32)

    def by_table(
        self, tables: Sequence[str], rows: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[dict[str, npt.NDArray[np.int64]], list[npt.NDArray[np.int32]]]:
        """De-duplicate rows per table.

        Args:
            tables: Table of each feature.
            rows: Rows of each feature, at least 0.

        Returns:
            table -> its distinct rows, ascending; and of each feature the positions of its ids in them.
        """
        unique_rows: dict[str, npt.NDArray[np.int64]] = {}
        positions: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(rows)
        features: dict[str, list[int]] = {}
        for index, table in enumerate(tables):
            features.setdefault(table, []).append(index)
        for table, own in features.items():
            if len(own) == 1:
                unique_rows[table], positions[own[0]] = self._distinct(rows[own[0]])
                continue
            parts = [rows[index] for index in own]
            unique_rows[table], inverse = self._distinct(np.concatenate(parts))
            pieces = np.split(inverse, np.cumsum([len(part) for part in parts])[:-1])
            for index, piece in zip(own, pieces, strict=True):
                positions[index] = piece
        return unique_rows, positions

    def _distinct(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the distinct rows, ascending, and where each row is among them.

        Every row leaves its place in a mark of its own; the place that stays is the row's one representative. Marks of
        earlier calls do no harm: only those are read that were written in this one.
        """
        count, largest = len(rows), int(rows.max(initial=0))
        if largest >= _MARKS_MAX:
            unique, inverse = np.unique(rows, return_inverse=True)
            return unique, inverse.astype(np.int32)
        if largest >= len(self._marks):
            self._marks = np.zeros(1 << largest.bit_length(), np.int32)
        if count > len(self._places):
            self._places = np.arange(1 << count.bit_length(), dtype=np.int32)
        places = self._places[:count]
        self._marks[rows] = places
        unique = rows.compress(self._marks[rows] == places)
        unique.sort()
        self._marks[unique] = places[: len(unique)]
        return unique, self._marks[rows]
