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
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from models.source import WeightSource
from shared.hashing import EntityId
from shared.schema.features import FeatureBatch, JaggedIds
from shared.schema.stamp import Stamp
from shared.wire import CandidateBatch

_WORD_BITS = 63


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
        vocabularies: Of the candidate-side tables that have one.
        catalog: Attributes of items.
    """

    def __init__(self, config: RankerConfig, vocabularies: Mapping[str, Vocabulary], catalog: ItemCatalog) -> None:
        self._config = config
        self._items = vocabularies["item"]
        self._catalog = catalog
        self._carried = CarriedRows(config, vocabularies)

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
        unique_rows, positions = _unique_by_table(
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
            num_oov={
                feature.name: len(jagged[feature.name][0]) - int(np.count_nonzero(jagged[feature.name][0] != OOV_ROW))
                for feature in features
            },
        )


def _unique_by_table(
    tables: Sequence[str], rows: Sequence[npt.NDArray[np.int64]]
) -> tuple[dict[str, npt.NDArray[np.int64]], list[npt.NDArray[np.int32]]]:
    """De-duplicate rows per table.

    One sort for all tables: of 64-bit words that hold table, row and place, so that sorting moves the places along.

    Args:
        tables: Table of each feature.
        rows: Rows of each feature, at most 2**31 and at least 0.

    Returns:
        table -> its distinct rows, ascending; and of each feature the positions of its ids in them.
    """
    names = list(dict.fromkeys(tables))
    sizes = [len(part) for part in rows]
    total = sum(sizes)
    place_bits = max(total, 1).bit_length()
    table_of = np.repeat(np.array([names.index(name) for name in tables], np.int64), sizes)
    flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    row_bits = int(flat.max(initial=0)).bit_length()
    if place_bits + row_bits + len(names).bit_length() > _WORD_BITS:
        raise ValueError(
            f"{total} ids of rows with {row_bits} bits in {len(names)} tables do not fit {_WORD_BITS} bits"
        )
    words = (((table_of << row_bits) | flat) << place_bits) | np.arange(total)
    words.sort()
    places, pairs = words & ((1 << place_bits) - 1), words >> place_bits
    is_first = np.ones(total, np.bool_)
    is_first[1:] = pairs[1:] != pairs[:-1]
    distinct = pairs[is_first]
    starts = np.searchsorted(distinct, np.arange(len(names) + 1, dtype=np.int64) << row_bits)
    unique_rows = {
        name: distinct[starts[index] : starts[index + 1]] & ((1 << row_bits) - 1) for index, name in enumerate(names)
    }
    positions = np.empty(total, np.int32)
    positions[places] = np.cumsum(is_first) - 1
    positions -= starts[table_of].astype(np.int32)
    return unique_rows, np.split(positions, np.cumsum(sizes)[:-1])
