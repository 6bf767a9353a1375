"""Candidates as columns: what a request says of its candidates, feature by feature. Numpy only.

Shape letters: C candidates, T ids of one feature over all candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError
from shared.hashing import EntityId, canonical_id, id_key, id_keys

TEXT = -1
"""Stands in ``CandidateBatch.integers`` where the id is a text."""

FeatureValue: TypeAlias = float | Sequence[EntityId] | Mapping[str, Sequence[EntityId] | Sequence[float]]
"""What one candidate says of one feature: a number, a list of ids, or ``{"ids": [..], "weights": [..]}``."""


@dataclass(frozen=True, slots=True)
class IdLists:
    """One feature as a list of ids a candidate.

    Candidate ``c`` owns ``ids[offsets[c]:offsets[c + 1]]``.

    Args:
        offsets: int64 [C + 1], non-decreasing, from 0 to T.
        ids: int64 [T], id keys (``shared.hashing.id_key``).
        weights: float32 [T], finite; None: all ids weigh the same.
    """

    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """One feature as a number a candidate.

    Args:
        values: float32 [C], NaN where a candidate does not say.
    """

    values: npt.NDArray[np.float32]


Column: TypeAlias = IdLists | Numbers


@dataclass(frozen=True, slots=True)
class CandidateBatch:
    """The C candidates of one request.

    Args:
        integers: int64 [C], integer ids, ``TEXT`` where the id is a text.
        texts: The ids that are texts, in order.
        features: Feature name -> its column; what a candidate does not say comes from the catalog.
    """

    integers: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    features: dict[str, Column]

    @classmethod
    def of(cls, ids: Sequence[EntityId], features: Mapping[str, Column] | None = None) -> Self:
        """Build from raw ids; a decimal string is the integer it spells, as everywhere."""
        canonical = [canonical_id(value) for value in ids]
        texts = tuple(value for value in canonical if isinstance(value, str))
        integers = [TEXT if isinstance(value, str) else value for value in canonical] if texts else canonical
        return cls(np.array(integers, np.int64), texts, dict(features or {}))

    def __len__(self) -> int:
        """Number of candidates C."""
        return len(self.integers)

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Id keys, int64 [C]."""
        if not self.texts:
            return self.integers
        keys = self.integers.copy()
        keys[self.integers == TEXT] = id_keys(self.texts)
        return keys

    @property
    def ids(self) -> list[EntityId]:
        """Raw ids, integers and texts."""
        texts = iter(self.texts)
        found: list[EntityId] = self.integers.tolist()
        return [next(texts) if value == TEXT else value for value in found] if self.texts else found


def columns_of(rows: Sequence[Mapping[str, FeatureValue]]) -> dict[str, Column]:
    """Turn one map a candidate into columns.

    Args:
        rows: C maps; a feature that a candidate does not name is an empty list, or NaN.

    Raises:
        InvalidRequestError: one candidate gives ids for a feature where another gives a number, or weights that do not
            fit the ids; names both.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column(name, [row.get(name) for row in rows]) for name in names}


def _column(name: str, values: Sequence[FeatureValue | None]) -> Column:
    are_numbers = [isinstance(value, (int, float)) for value in values if value is not None]
    if all(are_numbers):
        return Numbers(np.array([np.nan if value is None else value for value in values], np.float32))
    if any(are_numbers):
        raise InvalidRequestError(
            f"features.{name} must be numbers or lists of ids for all candidates, is both",
            field=f"features.{name}", limit="one kind", value="both",
        )  # fmt: skip
    lists: list[Sequence[EntityId]] = []
    weights: list[float] = []
    is_weighted = False
    for position, value in enumerate(values):
        ids, own = _weighted(name, position, value)
        lists.append(ids)
        is_weighted |= own is not None
        weights += [1.0] * len(ids) if own is None else own
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    keys = np.fromiter((id_key(id_) for ids in lists for id_ in ids), np.int64, int(offsets[-1]))
    return IdLists(offsets, keys, np.array(weights, np.float32) if is_weighted else None)


def _weighted(name: str, position: int, value: object) -> tuple[Sequence[EntityId], Sequence[float] | None]:
    if not isinstance(value, Mapping):
        ids: Sequence[EntityId] = value if isinstance(value, Sequence) else ()
        return ids, None
    ids, weights = value["ids"], value.get("weights")
    if weights is not None and len(weights) != len(ids):
        raise InvalidRequestError(
            f"features.{position}.{name} must have as many weights as ids, has {len(weights)} for {len(ids)}",
            field=f"features.{position}.{name}.weights", limit=len(ids), value=len(weights),
        )  # fmt: skip
    return ids, weights
