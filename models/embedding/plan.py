"""Which shard holds which part of which table: plain arithmetic, the same in every process.

Every shard and every reader sees the same request and works out the same answer to "who gives this row?"; nothing about
it travels. Rows that several shards hold (replicated tables, hot rows) are dealt round the shards by their place among
the request's rows, so that they level the load.

Shape letters: S shards, R rows of a table, U rows of a request, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from models.config import Placement, RankerConfig
from models.embedding.quantized import StoredRows

RowIds = npt.NDArray[np.int64]

_NONE: RowIds = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one table lies.

    Args:
        kind: ``table_wise``: on one shard. ``row_wise``: row ``r`` on shard ``r % S``. ``column_wise``: all rows on
            every shard, some columns each. ``replicated``: everything on every shard.
        owner: The shard of a table-wise table.
        hot: int64, ascending, rows of a row-wise table that every shard holds besides its own.
    """

    kind: Placement
    owner: int = 0
    hot: RowIds = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Placement of the candidate-side tables on S shards.

    Args:
        num_shards: S, at least 1.
        width: D, width of all tables.
        placed: table -> where it lies, all tables of the plan.
    """

    num_shards: int
    width: int
    placed: dict[str, Placed]

    @classmethod
    def of(cls, config: RankerConfig, num_shards: int, hot: Mapping[str, RowIds] | None = None) -> Self:
        """Plan the tables that candidates read; table-wise tables without a shard go round the shards in order.

        Args:
            config: The ranker's configuration.
            num_shards: S.
            hot: table -> int64, ascending, its hot rows.

        Raises:
            ValueError: ``num_shards`` is under 1.
        """
        if num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, is {num_shards}")
        placed: dict[str, Placed] = {}
        dealt = 0
        for name in config.candidate_tables:
            table = config.table(name)
            owner = 0
            if table.placement == "table_wise":
                owner = (dealt if table.shard is None else table.shard) % num_shards
                dealt += table.shard is None
            placed[name] = Placed(table.placement, owner, (hot or {}).get(name, _NONE))
        return cls(num_shards, config.width, placed)

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables of the plan."""
        return tuple(self.placed)

    def tables_of(self, shard: int) -> tuple[str, ...]:
        """Return the tables of which a shard holds something."""
        return tuple(name for name in self.placed if self._holds(name, shard))

    def columns(self, table: str, shard: int) -> tuple[int, int]:
        """Return which columns of its rows a shard gives: from, to."""
        if self.placed[table].kind != "column_wise":
            return 0, self.width
        # In pairs where the width is even, so that an int4 row is never cut inside a byte.
        unit = 1 if self.width % 2 else 2
        num_units = self.width // unit
        return num_units * shard // self.num_shards * unit, num_units * (shard + 1) // self.num_shards * unit

    def owned(self, table: str, shard: int, rows: RowIds) -> npt.NDArray[np.bool_]:
        """Tell which rows of a request a shard gives: int64 [U] -> bool [U].

        Args:
            table: Table name.
            shard: The shard.
            rows: All rows of the table that the request needs, in the order that every shard sees.
        """
        placed = self.placed[table]
        if placed.kind in ("table_wise", "column_wise"):
            return np.full(rows.shape, self._holds(table, shard))
        if placed.kind == "replicated":
            return np.asarray(np.arange(len(rows)) % self.num_shards == shard)
        if not len(placed.hot):
            return np.asarray(self._modulo(rows) == shard)
        _, is_hot = _find(placed.hot, rows)
        dealt = np.cumsum(is_hot) - 1
        return np.asarray(np.where(is_hot, dealt, rows) % self.num_shards == shard)

    def local_rows(self, table: str, rows: RowIds) -> RowIds:
        """Return where owned rows lie in their shard's part of the table: int64 [U] -> int64 [U].

        A row outside the table gives one outside the part, except in a table with hot rows: check those before.
        """
        placed = self.placed[table]
        if placed.kind != "row_wise":
            return rows
        own = self._quotient(rows)
        if not len(placed.hot):
            return own
        where, is_hot = _find(placed.hot, rows)
        return np.where(is_hot, where, len(placed.hot) + own)

    def wanted(self, table: str, shard: int, rows: RowIds) -> RowIds:
        """Return ``local_rows`` of the owned rows: int64 [U] -> int64 [U_s]."""
        kind = self.placed[table].kind
        if kind in ("table_wise", "column_wise") and self._holds(table, shard):
            return rows
        # Twice as fast as indexing with the mask: a random pattern of bits defeats branch prediction.
        return self.local_rows(table, rows.take(self.owned(table, shard, rows).nonzero()[0]))

    def _modulo(self, rows: RowIds) -> RowIds:
        """Return rows modulo S."""
        # Division of 64-bit integers is most of what a look-up costs beside FBGEMM; powers of two need none.
        return rows & (self.num_shards - 1) if self._is_power_of_two else rows % self.num_shards

    def _quotient(self, rows: RowIds) -> RowIds:
        """Return rows divided by S, rounded down."""
        return rows >> (self.num_shards.bit_length() - 1) if self._is_power_of_two else rows // self.num_shards

    @property
    def _is_power_of_two(self) -> bool:
        return not self.num_shards & (self.num_shards - 1)

    def part(self, table: str, shard: int, whole: StoredRows) -> StoredRows:
        """Return a shard's part of a table, empty when it holds none; a view where it can be.

        A row-wise part begins with the hot rows.
        """
        placed = self.placed[table]
        if placed.kind == "row_wise":
            own = whole.rows(shard, self.num_shards)
            if not len(placed.hot):
                return own
            data = np.concatenate([whole.data[placed.hot], own.data])
            return StoredRows(whole.row_type, whole.width, data)
        if placed.kind == "column_wise":
            return whole.columns(*self.columns(table, shard))
        return whole if self._holds(table, shard) else StoredRows(whole.row_type, whole.width, whole.data[:0])

    def _holds(self, table: str, shard: int) -> bool:
        placed = self.placed[table]
        if placed.kind == "table_wise":
            return placed.owner == shard
        first, last = self.columns(table, shard)
        return last > first


def choose_hot_rows(counts: npt.NDArray[np.integer], num_rows: int) -> RowIds:
    """Return the rows with the most traffic, ascending.

    Args:
        counts: integers [R], reads of each row; rows that were never read are never hot.
        num_rows: How many at most.
    """
    order = np.argsort(-counts.astype(np.int64), kind="stable")[:num_rows]
    return np.sort(order[counts[order] > 0]).astype(np.int64)


def _find(hot: RowIds, rows: RowIds) -> tuple[RowIds, npt.NDArray[np.bool_]]:
    """Return where rows lie among the hot ones, and which do."""
    where = np.minimum(np.searchsorted(hot, rows), len(hot) - 1)
    return where, hot[where] == rows
