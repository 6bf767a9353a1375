"""Which shard holds which rows of which table: plain arithmetic, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Placement of the candidate-side tables on S shards.

    Args:
        num_shards: S, at least 1.
        owner: table -> its shard, for table-wise tables; row-wise tables (row ``r`` on shard ``r % S``) are not in it.
        tables: All tables of the plan.
    """

    num_shards: int
    owner: dict[str, int]
    tables: tuple[str, ...]

    @classmethod
    def of(cls, config: RankerConfig, num_shards: int) -> Self:
        """Plan the tables that candidates read; table-wise tables go round the shards in order.

        Raises:
            ValueError: ``num_shards`` is under 1.
        """
        if num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, is {num_shards}")
        owner: dict[str, int] = {}
        for name in config.candidate_tables:
            if config.table(name).placement == "table_wise":
                owner[name] = len(owner) % num_shards
        return cls(num_shards, owner, config.candidate_tables)

    def tables_of(self, shard: int) -> tuple[str, ...]:
        """Return the tables of which a shard holds rows."""
        return tuple(name for name in self.tables if self.owner.get(name, shard) == shard)

    def owned(self, table: str, shard: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which rows a shard owns: int64 [U] -> bool [U]."""
        if table in self.owner:
            return np.full(rows.shape, self.owner[table] == shard)
        return np.asarray(rows % self.num_shards == shard)

    def local_rows(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where owned rows lie in their shard's part of the table: int64 [U] -> int64 [U]."""
        return rows if table in self.owner else rows // self.num_shards

    def part(self, table: str, shard: int, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a shard's part of a table (float32 [rows, D]), empty when it owns none; a view where it can be."""
        if table in self.owner:
            return weight if self.owner[table] == shard else weight[:0]
        return weight[shard :: self.num_shards]
