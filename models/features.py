"""FeatureExtractor: raw candidate ids -> table rows, the half of the ranker that preprocess runs. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.embedding.catalog import ItemCatalog
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.source import WeightSource
from shared.hashing import EntityId, id_keys
from shared.schema.features import FeatureBatch, JaggedIds, PreprocessTask
from shared.schema.stamp import Stamp


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
    """Maps candidates to rows.

    Args:
        config: The ranker's configuration.
        items: Vocabulary of table ``item``.
        catalog: Attributes of items.
    """

    def __init__(self, config: RankerConfig, items: Vocabulary, catalog: ItemCatalog) -> None:
        self._config = config
        self._items = items
        self._catalog = catalog

    @classmethod
    def from_weights(cls, source: WeightSource) -> Self:
        """Read configuration, vocabulary and catalog of a weights version."""
        config = RankerConfig.model_validate(source.json("model"))
        return cls(config, Vocabulary.from_weights(source, "item"), ItemCatalog.from_weights(source))

    def extract(self, task: PreprocessTask) -> CandidateFeatures:
        """Return the candidate side of a request; ids out of vocabulary get row 0 and are counted."""
        return self.extract_ids(task.candidates)

    def extract_ids(self, candidates: Sequence[EntityId]) -> CandidateFeatures:
        """Return the candidate side of C raw ids."""
        return self.extract_keys(id_keys(candidates))

    def extract_keys(self, keys: npt.NDArray[np.int64]) -> CandidateFeatures:
        """Return the candidate side of C id keys: int64 [C]."""
        item_rows = self._items.rows(keys)
        attributes = self._catalog.attributes(keys)
        single = np.arange(len(keys) + 1, dtype=np.int64)
        jagged = {
            "item_id": (item_rows, single),
            "genres": (attributes.genre_rows, attributes.genre_offsets),
            "year": (attributes.year_rows, single),
        }
        unique_rows, positions = _unique_by_table(
            {feature.name: (feature.table, jagged[feature.name][0]) for feature in self._config.candidate_features}
        )
        return CandidateFeatures(
            candidate_keys=keys,
            group_keys=attributes.group_keys,
            unique_rows=unique_rows,
            features={name: JaggedIds(ids, jagged[name][1].astype(np.int32)) for name, ids in positions.items()},
            dense=attributes.counters,
            num_oov={name: int((jagged[name][0] == OOV_ROW).sum()) for name in positions},
        )


def _unique_by_table(
    features: dict[str, tuple[str, npt.NDArray[np.int64]]],
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, npt.NDArray[np.int32]]]:
    """De-duplicate rows per table; returns table -> ascending rows, and feature -> positions of its ids in them."""
    by_table: dict[str, list[str]] = {}
    for name, (table, _) in features.items():
        by_table.setdefault(table, []).append(name)
    unique_rows: dict[str, npt.NDArray[np.int64]] = {}
    positions: dict[str, npt.NDArray[np.int32]] = {}
    for table, names in by_table.items():
        parts = [features[name][1] for name in names]
        unique, inverse = np.unique(np.concatenate(parts), return_inverse=True)
        unique_rows[table] = unique
        bounds = np.cumsum([len(part) for part in parts])[:-1]
        positions |= dict(zip(names, np.split(inverse.astype(np.int32), bounds), strict=True))
    return unique_rows, positions
