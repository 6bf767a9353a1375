"""What candidates carry in a request, as table rows: cut, hashed and bucketed for all candidates at once. Numpy only.

A feature is a list of ids or a number (``FeatureConfig.number_bounds``). Of an id list the ``ids_max`` heaviest stay,
of equals the earlier ones, in the order in which they were sent; ids become rows by the table's vocabulary, or by a
hash where the table has ``num_rows`` instead. A number becomes 1 + how many bounds it has reached, none becomes row 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.segmented_topk import segmented_topk
from models.config import CATALOG_FEATURES, RankerConfig
from models.embedding.vocabulary import OOV_ROW, Vocabulary
from shared.errors import InvalidRequestError
from shared.hashing import hash64, mix_keys
from shared.wire import CandidateBatch, Column, IdLists, Numbers

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


@dataclass(frozen=True, slots=True)
class _IdFeature:
    """What is known of one id feature before a request comes; ``num_rows`` 0: the table has a vocabulary."""

    name: str
    ids_max: int
    table: str
    num_rows: int
    salt: int
    is_carried: bool


class CarriedRows:
    """Maps carried features to rows.

    Args:
        config: The ranker's configuration.
        vocabularies: Of the tables that have one.
    """

    def __init__(self, config: RankerConfig, vocabularies: Mapping[str, Vocabulary]) -> None:
        self._config = config
        self._vocabularies = vocabularies
        self._bounds: dict[str, npt.NDArray[np.float32]] = {}
        self._lists: list[_IdFeature] = []
        for feature in config.candidate_features:
            if feature.number_bounds is not None:
                self._bounds[feature.name] = np.array(feature.number_bounds, np.float32)
            elif feature.name != "item_id":
                num_rows = config.table(feature.table).num_rows or 0
                salt, is_carried = hash64(feature.name.encode()), feature.name not in CATALOG_FEATURES
                self._lists.append(_IdFeature(feature.name, feature.ids_max, feature.table, num_rows, salt, is_carried))
        self._lists.sort(key=lambda each: not each.num_rows)  # hashed ones first, so that they lie side by side

    def rows(self, batch: CandidateBatch) -> dict[str, Jagged]:
        """Return rows and offsets of every feature that must be carried or is.

        Raises:
            InvalidRequestError: see ``check_carried``.
        """
        check_carried(batch, self._config)
        found = {name: self._number_rows(name, batch.features.get(name), len(batch)) for name in self._bounds}
        nothing = (np.zeros(0, np.int64), np.zeros(len(batch) + 1, np.int64))
        carried: list[tuple[_IdFeature, IdLists]] = []
        for feature in self._lists:
            column = batch.features.get(feature.name)
            if isinstance(column, IdLists):
                carried.append((feature, column))
            elif feature.is_carried:
                found[feature.name] = nothing
        return found | self._list_rows(carried) if carried else found

    def _number_rows(self, name: str, column: Column | None, count: int) -> Jagged:
        offsets = np.arange(count + 1, dtype=np.int64)
        if not isinstance(column, Numbers):
            return np.full(count, OOV_ROW, np.int64), offsets
        rows = np.searchsorted(self._bounds[name], column.values, side="right") + 1
        rows[np.isnan(column.values)] = OOV_ROW
        return rows, offsets

    def _list_rows(self, carried: Sequence[tuple[_IdFeature, IdLists]]) -> dict[str, Jagged]:
        """Return the rows of all id lists, which are cut and hashed as one array."""
        columns = [column for _, column in carried]
        num_candidates = len(columns[0].offsets) - 1
        ids = np.concatenate([column.ids for column in columns])
        lengths = np.concatenate([np.diff(column.offsets) for column in columns])
        most = np.repeat([feature.ids_max for feature, _ in carried], num_candidates)
        if bool((lengths > most).any()):
            ids = ids[_kept(columns, lengths, most)]
            lengths = np.minimum(lengths, most)
        offsets = np.zeros((len(carried), num_candidates + 1), np.int64)
        np.cumsum(lengths.reshape(len(carried), num_candidates), axis=1, out=offsets[:, 1:])
        sizes = offsets[:, -1]
        num_hashed = sum(feature.num_rows > 0 for feature, _ in carried)
        hashed, hashed_sizes = [feature for feature, _ in carried[:num_hashed]], sizes[:num_hashed]
        salts = np.repeat(np.array([feature.salt for feature in hashed], np.uint64), hashed_sizes)
        num_rows = np.repeat(np.array([feature.num_rows for feature in hashed], np.int64), hashed_sizes)
        ids[: len(salts)] = hash_rows(ids[: len(salts)], salts, num_rows)
        found: dict[str, Jagged] = {}
        ends = np.cumsum(sizes)
        for index, (feature, _) in enumerate(carried):
            own = ids[ends[index] - sizes[index] : ends[index]]
            rows = own if feature.num_rows else self._vocabularies[feature.table].rows(own)
            found[feature.name] = (rows, offsets[index])
        return found


def hash_rows(keys: Ints, salts: npt.NDArray[np.uint64], num_rows: Ints) -> Ints:
    """Return rows 1 to ``num_rows - 1`` of id keys; all arrays [T].

    The upper half of the hash times the number of rows, over 2**32: a product and a shift where modulo would divide.
    """
    high = mix_keys(keys, salts) >> np.uint64(32)
    return np.asarray((high * (num_rows - 1).astype(np.uint64)) >> np.uint64(32), np.int64) + 1


def _kept(columns: Sequence[IdLists], lengths: Ints, most: Ints) -> npt.NDArray[np.bool_]:
    """Return which ids stay: bool over the ids of all columns; only lists that are too long are looked into.

    Args:
        columns: Id lists of F features.
        lengths: int64 [F * C], of every list.
        most: int64 [F * C], how many ids of each may stay.
    """
    kept = np.ones(int(lengths.sum()), np.bool_)
    starts = np.cumsum(lengths) - lengths
    weights = np.concatenate(
        [np.zeros(len(c.ids), np.float32) if c.weights is None else c.weights for c in columns]
    )  # fmt: skip
    is_long = lengths > most
    for ids_max in np.unique(most[is_long]).tolist():
        which = np.flatnonzero(is_long & (most == ids_max))
        own = lengths[which]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(own)])
        places = np.repeat(starts[which] - ends[:-1], own) + np.arange(ends[-1])
        chosen, _ = segmented_topk(weights[places], ends, ids_max)
        kept[places] = False
        kept[places[chosen]] = True
    return kept


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
