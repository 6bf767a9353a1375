"""Drops rows that hardly anybody reads: touch counts and ages in, a smaller table and an old -> new map out.

Rows that are dropped map to the out-of-vocabulary row, so a reader of the smaller table needs nothing but the map;
FBGEMM takes the same map as its ``index_remapping``.

Shape letters: R rows before, K rows after, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.embedding.vocabulary import OOV_ROW, Vocabulary


class TouchCounts:
    """How often each row was read, and when last.

    Args:
        num_rows: R.
    """

    def __init__(self, num_rows: int) -> None:
        self.counts = np.zeros(num_rows, np.int64)
        """int64 [R], times read."""
        self.last_s = np.full(num_rows, np.iinfo(np.int64).min, np.int64)
        """int64 [R], second of the last read; the smallest integer where there was none."""

    def touch(self, rows: npt.NDArray[np.int64], now_s: int) -> None:
        """Count reads.

        Args:
            rows: int64 of any shape, within ``[0, R)``, repeats count each.
            now_s: When, seconds since the epoch.

        Raises:
            ValueError: a row is outside the table.
        """
        flat = rows.ravel()
        if not len(flat):
            return
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high >= len(self.counts):
            raise ValueError(f"rows must be in [0, {len(self.counts)}), are {low} to {high}")
        distinct, repeats = np.unique(flat, return_counts=True)
        self.counts[distinct] += repeats
        self.last_s[distinct] = np.maximum(self.last_s[distinct], now_s)


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which rows stay, and where.

    Args:
        kept: int64 [K], old rows in ascending order, the out-of-vocabulary row first: new row -> old row.
        new_rows: int64 [R], old row -> new row; ``OOV_ROW`` for dropped ones.
    """

    kept: npt.NDArray[np.int64]
    new_rows: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, touches: TouchCounts, *, count_min: int = 1, age_s_max: int | None = None, now_s: int | None = None
    ) -> Self:
        """Choose the rows that were read at least ``count_min`` times and, with an age, lately enough.

        Args:
            touches: Counts and times.
            count_min: Fewest reads of a row that stays, at least 0.
            age_s_max: Longest since the last read of a row that stays, seconds; None: any.
            now_s: Now, seconds since the epoch; needed with an age.

        Raises:
            ValueError: ``count_min`` is negative, or there is an age and no now.
        """
        if count_min < 0:
            raise ValueError(f"count_min must be at least 0, is {count_min}")
        stays = touches.counts >= count_min
        if age_s_max is not None:
            if now_s is None:
                raise ValueError(f"now_s must be given with age_s_max {age_s_max}")
            stays &= touches.last_s >= now_s - age_s_max
        stays[OOV_ROW] = True
        kept = np.flatnonzero(stays)
        new_rows = np.full(len(stays), OOV_ROW, np.int64)
        new_rows[kept] = np.arange(len(kept))
        return cls(kept, new_rows)

    def table(self, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the smaller table: float32 [R, D] -> float32 [K, D].

        Raises:
            ValueError: the table has another number of rows.
        """
        if len(weight) != len(self.new_rows):
            raise ValueError(f"weight must have {len(self.new_rows)} rows, has {len(weight)}")
        return weight[self.kept]

    def vocabulary(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Vocabulary:
        """Return the vocabulary of the smaller table; keys of dropped rows leave it.

        Args:
            keys: int64 [V], ascending, the old vocabulary's.
            rows: int64 [V], their old rows.
        """
        moved = self.new_rows[rows]
        stays = moved != OOV_ROW
        return Vocabulary(keys[stays], moved[stays])
