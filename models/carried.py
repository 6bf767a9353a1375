"""What candidates carry in a request, as table rows: cut, hashed and bucketed for all candidates at once. Numpy only.

A feature is a list of ids or a number (``FeatureConfig.number_bounds``). Of an id list the ``ids_max`` heaviest stay,
of equals the earlier ones, in the order in which they were sent; ids become rows by the table's vocabulary, or by a
hash where the table has ``num_rows`` instead. A number becomes 1 + how many bounds it has reached, none becomes row 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.segmented_topk import segmented_topk
from models.config import FeatureConfig, RankerConfig
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from shared.errors import InvalidRequestError
from shared.hashing import hash64, mix_keys
from shared.wire import CandidateBatch, IdLists, Numbers

Ints: TypeAlias = npt.NDArray[np.int64]
Jagged: TypeAlias = tuple[Ints, Ints]
"""Rows of C candidates, int64 [T], and their offsets, int64 [C + 1]."""


def check_carried(batch: CandidateBatch, config: RankerConfig) -> None:
    """Refuse features that the model does not have, and those of another kind than it takes.

    Raises:
        InvalidRequestError: names the feature, and what there is.
    """
    if not batch.features:
        return
    wanted = {feature.name: feature for feature in config.candidate_features if feature.name != "item_id"}
    for name, column in batch.features.items():
        if (feature := wanted.get(name)) is None:
            raise InvalidRequestError(
                f"features.{name} is not a feature of the model, there are {', '.join(wanted)}",
                field=f"features.{name}", limit=", ".join(wanted), value=name,
            )  # fmt: skip
        kinds = ("ids", "numbers") if feature.number_bounds is None else ("numbers", "ids")
        if isinstance(column, Numbers) != (feature.number_bounds is not None):
            raise InvalidRequestError(
                f"features.{name} must be {kinds[0]}, are {kinds[1]}",
                field=f"features.{name}", limit=kinds[0], value=kinds[1],
            )  # fmt: skip


class CarriedRows:
    """Maps carried features to rows.

    Args:
        config: The ranker's configuration.
        vocabularies: Of the tables that have one.
    """

    def __init__(self, config: RankerConfig, vocabularies: Mapping[str, Vocabulary]) -> None:
        self._config = config
        self._vocabularies = vocabularies
        self._bounds = {
            feature.name: np.array(feature.number_bounds, np.float32)
            for feature in config.candidate_features
            if feature.number_bounds is not None
        }

    def rows(self, batch: CandidateBatch) -> dict[str, Jagged]:
        """Return rows and offsets of every feature that must be carried or is.

        Raises:
            InvalidRequestError: see ``check_carried``.
        """
        check_carried(batch, self._config)
        found: dict[str, Jagged] = {}
        lists: list[tuple[FeatureConfig, IdLists]] = []
        nothing = IdLists(np.zeros(len(batch) + 1, np.int64), np.zeros(0, np.int64))
        for feature in self._config.candidate_features:
            column = batch.features.get(feature.name)
            if feature.number_bounds is not None:
                found[feature.name] = self._number_rows(feature.name, column, len(batch))
            elif isinstance(column, IdLists):
                lists.append((feature, column))
            elif feature in self._config.carried_features:
                found[feature.name] = (nothing.ids, nothing.offsets)
        return found | self._list_rows(lists)

    def _number_rows(self, name: str, column: object, count: int) -> Jagged:
        offsets = np.arange(count + 1, dtype=np.int64)
        if not isinstance(column, Numbers):
            return np.full(count, OOV_ROW, np.int64), offsets
        rows = np.searchsorted(self._bounds[name], column.values, side="right") + 1
        rows[np.isnan(column.values)] = OOV_ROW
        return rows, offsets

    def _list_rows(self, lists: Sequence[tuple[FeatureConfig, IdLists]]) -> dict[str, Jagged]:
        """Return the rows of all id lists; those of hashed tables are hashed in one go."""
        kept = _cut([(feature.ids_max, column) for feature, column in lists])
        hashed = [index for index, (feature, _) in enumerate(lists) if self._config.table(feature.table).num_rows]
        found: dict[str, Jagged] = {}
        if hashed:
            parts = [kept[index][0] for index in hashed]
            sizes = [len(part) for part in parts]
            features = [lists[index][0] for index in hashed]
            num_rows = [self._config.table(feature.table).num_rows or 0 for feature in features]
            salts = np.array([hash64(feature.name.encode()) for feature in features], np.uint64)
            rows = hash_rows(np.concatenate(parts), np.repeat(salts, sizes), np.repeat(np.array(num_rows), sizes))
            pieces = np.split(rows, np.cumsum(sizes)[:-1])
            for index, feature, piece in zip(hashed, features, pieces, strict=True):
                found[feature.name] = (piece, kept[index][1])
        for (feature, _), (ids, offsets) in zip(lists, kept, strict=True):
            if feature.name not in found:
                found[feature.name] = (self._vocabularies[feature.table].rows(ids), offsets)
        return found


def hash_rows(keys: Ints, salts: npt.NDArray[np.uint64], num_rows: Ints) -> Ints:
    """Return rows 1 to ``num_rows - 1`` of id keys; all arrays [T].

    The upper half of the hash times the number of rows, over 2**32: a product and a shift where modulo would divide.
    """
    high = mix_keys(keys, salts) >> np.uint64(32)
    return np.asarray((high * (num_rows - 1).astype(np.uint64)) >> np.uint64(32), np.int64) + 1


def _cut(lists: Sequence[tuple[int, IdLists]]) -> list[Jagged]:
    """Return ids and offsets of each list, cut to its most ids a candidate."""
    cut: list[Jagged] = [(column.ids, column.offsets) for _, column in lists]
    too_long: dict[int, list[int]] = {}
    for index, (ids_max, column) in enumerate(lists):
        if len(column.ids) and int(np.diff(column.offsets).max()) > ids_max:
            too_long.setdefault(ids_max, []).append(index)
    for ids_max, indices in too_long.items():  # one call for all features of one length
        columns = [lists[index][1] for index in indices]
        weights = [np.zeros(len(c.ids), np.float32) if c.weights is None else c.weights for c in columns]
        ends = np.cumsum([0, *(len(column.ids) for column in columns)])
        offsets = [column.offsets[:-1] + begin for column, begin in zip(columns, ends[:-1], strict=True)]
        chosen, kept = segmented_topk(np.concatenate(weights), np.concatenate([*offsets, ends[-1:]]), ids_max)
        chosen.sort()  # back to the order in which they were sent; a segment keeps its place
        ids = np.concatenate([column.ids for column in columns])[chosen]
        count = len(columns[0].offsets) - 1
        for place, index in enumerate(indices):
            own = kept[place * count : (place + 1) * count + 1]
            cut[index] = (ids[own[0] : own[-1]], own - own[0])
    return cut


def prefer(carried: Jagged, known: Jagged) -> Jagged:
    """Return for each candidate what it carries, or what the catalog knows where it carries nothing."""
    lengths, other = np.diff(carried[1]), np.diff(known[1])
    is_own = lengths > 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(is_own, lengths, other))])
    rows = np.empty(int(offsets[-1]), np.int64)
    from_own = np.repeat(is_own, np.diff(offsets))
    rows[from_own] = carried[0]
    rows[~from_own] = known[0][np.repeat(~is_own, other)]
    return rows, offsets
