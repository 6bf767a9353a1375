"""What candidates carry in a request, as table rows: cut, hashed and bucketed for all candidates at once. Numpy only.

A feature is a list of ids or a number (``FeatureConfig.number_bounds``). Of an id list the ``ids_max`` heaviest stay,
of equals the earlier ones, in the order in which they were sent; ids become rows by the table's vocabulary, or by a
hash where the table has ``num_rows`` instead. A number becomes 1 + how many bounds it has reached, none becomes row 0.
"""

from __future__ import annotations

import itertools
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

    def rows(self, batch: CandidateBatch) -> dict[str, Jagged]:
        """Return rows and offsets of every feature that must be carried or is.

        Raises:
            InvalidRequestError: see ``check_carried``.
        """
        check_carried(batch, self._config)
        one_each = np.arange(len(batch) + 1, dtype=np.int64)
        found: dict[str, Jagged] = {
            name: (self._number_rows(name, batch.features.get(name), len(batch)), one_each) for name in self._bounds
        }
        nothing = (np.zeros(0, np.int64), np.zeros(len(batch) + 1, np.int64))
        carried: list[tuple[_IdFeature, IdLists]] = []
        for feature in self._lists:
            column = batch.features.get(feature.name)
            if isinstance(column, IdLists):
                carried.append((feature, column))
            elif feature.is_carried:
                found[feature.name] = nothing
        cut = _cut([column for _, column in carried], [feature.ids_max for feature, _ in carried])
        hashed: list[tuple[_IdFeature, Jagged]] = []
        for (feature, _), (ids, offsets) in zip(carried, cut, strict=True):
            if feature.num_rows:
                hashed.append((feature, (ids, offsets)))
            else:
                found[feature.name] = (self._vocabularies[feature.table].rows(ids), offsets)
        return found | self._hash(hashed) if hashed else found

    def _number_rows(self, name: str, column: Column | None, count: int) -> Ints:
        if not isinstance(column, Numbers):
            return np.full(count, OOV_ROW, np.int64)
        rows = np.searchsorted(self._bounds[name], column.values, side="right")
        rows += 1
        rows[np.isnan(column.values)] = OOV_ROW
        return rows

    def _hash(self, hashed: Sequence[tuple[_IdFeature, Jagged]]) -> dict[str, Jagged]:
        """Return the rows of features without a vocabulary, hashed as one array: numpy's calls cost more than ids."""
        sizes = [len(ids) for _, (ids, _) in hashed]
        rows = hash_rows(
            np.concatenate([ids for _, (ids, _) in hashed]),
            np.repeat(np.array([feature.salt for feature, _ in hashed], np.uint64), sizes),
            np.repeat(np.array([feature.num_rows for feature, _ in hashed], np.uint64), sizes),
        )
        ends = list(itertools.accumulate(sizes))
        return {
            feature.name: (rows[end - size : end], offsets)
            for (feature, (_, offsets)), size, end in zip(hashed, sizes, ends, strict=True)
        }


def hash_rows(keys: Ints, salts: npt.NDArray[np.uint64], num_rows: npt.NDArray[np.uint64]) -> Ints:
    """Return rows 1 to ``num_rows - 1`` of id keys; all arrays [T].

    The upper half of the hash times the number of rows, over 2**32: a product and a shift where modulo would divide.
    """
    rows = mix_keys(keys, salts)
    rows >>= _HALF
    rows *= num_rows - np.uint64(1)
    rows >>= _HALF
    rows += np.uint64(1)
    return rows.view(np.int64)


_HALF = np.uint64(32)


def _cut(columns: Sequence[IdLists], ids_max: Sequence[int]) -> list[Jagged]:
    """Return ids and offsets of each feature, of every list the heaviest that may stay, in the order sent.

    Args:
        columns: Id lists of F features.
        ids_max: Of each feature, how many ids of a list stay.
    """
    found: list[Jagged] = [(column.ids, column.offsets) for column in columns]
    by_weight: dict[int, list[int]] = {}
    for index, (column, most) in enumerate(zip(columns, ids_max, strict=True)):
        lengths = column.offsets[1:] - column.offsets[:-1]
        if int(lengths.max(initial=0)) <= most:
            continue
        if column.weights is not None:
            by_weight.setdefault(most, []).append(index)
            continue
        np.minimum(lengths, most, out=lengths)
        offsets = _offsets(lengths)
        places = np.arange(offsets[-1])
        places += np.repeat(column.offsets[:-1] - offsets[:-1], lengths)
        found[index] = (column.ids[places], offsets)
    for most, own in by_weight.items():
        for index, cut in zip(own, _heaviest([columns[index] for index in own], most), strict=True):
            found[index] = cut
    return found


def _heaviest(columns: Sequence[IdLists], ids_max: int) -> list[Jagged]:
    """Cut weighted lists of F features as one; only those that are too long are looked into."""
    lengths = np.concatenate([column.offsets[1:] - column.offsets[:-1] for column in columns])
    weights = np.concatenate([column.weights for column in columns if column.weights is not None])
    which = np.flatnonzero(lengths > ids_max)
    own = lengths[which]
    ends = _offsets(own)
    places = np.arange(ends[-1])
    places += np.repeat((np.cumsum(lengths) - lengths)[which] - ends[:-1], own)
    chosen, _ = segmented_topk(weights[places], ends, ids_max)
    is_kept = np.ones(len(weights), np.bool_)
    is_kept[places] = False
    is_kept[places[chosen]] = True
    lengths[which] = ids_max
    found: list[Jagged] = []
    begin = 0
    for column, taken in zip(columns, lengths.reshape(len(columns), -1), strict=True):
        end = begin + len(column.ids)
        found.append((column.ids.compress(is_kept[begin:end]), _offsets(taken)))
        begin = end
    return found


def _offsets(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


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
