"""Vocabulary: 64-bit id key -> table row, by binary search in a sorted array; row 0 is for keys that are not there."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

from models.source import Tensors, WeightSource, tensor
from shared.errors import WeightsError

GROUP = "vocabulary"

OOV_ROW = 0
"""Row of every table that serves ids out of vocabulary."""


class Vocabulary:
    """Keys of one table.

    Args:
        keys: int64 [V], strictly ascending.
        rows: int64 [V], at least 1, distinct.

    Raises:
        WeightsError: the arrays break one of these rules.
    """

    __slots__ = ("_keys", "_rows")

    def __init__(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        if keys.shape != rows.shape or keys.ndim != 1:
            raise WeightsError(f"vocabulary needs as many keys as rows, has {keys.shape} and {rows.shape}")
        if len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
            raise WeightsError("vocabulary keys must be strictly ascending")
        if len(rows) and (int(rows.min()) <= OOV_ROW or len(np.unique(rows)) != len(rows)):
            raise WeightsError(f"vocabulary rows must be distinct and above {OOV_ROW}")
        self._keys = keys
        self._rows = rows

    @classmethod
    def of(cls, keys: npt.NDArray[np.int64]) -> Self:
        """Number keys (any order, may repeat) from row 1 in ascending order."""
        distinct = np.unique(keys)
        return cls(distinct, np.arange(1, len(distinct) + 1, dtype=np.int64))

    @classmethod
    def from_weights(cls, source: WeightSource, table: str) -> Self:
        """Read the vocabulary of one table."""
        return cls(tensor(source, GROUP, f"{table}.keys", np.int64), tensor(source, GROUP, f"{table}.rows", np.int64))

    def __len__(self) -> int:
        """Number of keys V."""
        return len(self._keys)

    @property
    def num_rows(self) -> int:
        """Rows that the table must have, row 0 included."""
        return 1 + (int(self._rows.max()) if len(self._rows) else 0)

    def rows(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map keys to rows: int64 of any shape -> int64 of that shape, ``OOV_ROW`` for unknown keys."""
        if not len(self._keys):
            return np.zeros(keys.shape, np.int64)
        found = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[found] == keys, self._rows[found], OOV_ROW)

    def row(self, key: int) -> int:
        """Map one key to its row."""
        return int(self.rows(np.array([key], np.int64))[0])

    def tensors(self, table: str) -> Tensors:
        """Return the two arrays under the names that ``from_weights`` reads."""
        return {f"{table}.keys": self._keys, f"{table}.rows": self._rows}
