"""One shard of the candidate-side tables, as a station runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig, TableBackend
from models.embedding.plan import ShardPlan
from models.embedding.quantized import StoredRows
from models.embedding.serving_rows import hot_rows, stored_rows
from models.embedding.shard_tables import check_rows, shard_tables
from models.source import WeightSource
from shared.errors import InvalidRequestError
from shared.schema.features import FeatureBatch


class TableShard:
    """One shard's part of the candidate-side tables.

    Args:
        source: The weights.
        shard: This shard, from 0.
        num_shards: S.
        backend: How rows are looked up, see ``models.embedding.shard_tables``.
        map_dir: Folder in which the shard's rows are put, to be read from there page by page: for tables that do not
            fit into memory, with backend ``reference``. None: they are in memory.

    Raises:
        ValueError: ``shard`` is not in ``[0, num_shards)``.
        WeightsError: the weights do not have the rows that the model asks for, or rows in files were asked of FBGEMM.
    """

    def __init__(
        self,
        source: WeightSource,
        shard: int,
        num_shards: int,
        backend: TableBackend = "reference",
        map_dir: Path | None = None,
    ) -> None:
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be in [0, {num_shards}), is {shard}")
        config = RankerConfig.model_validate(source.json("model"))
        self.shard = shard
        self._hot = hot_rows(source, config)
        self.plan = ShardPlan.of(config, num_shards, self._hot)
        self._num_rows: dict[str, int] = {}
        parts: dict[str, StoredRows] = {}
        for name in self.plan.tables_of(shard):
            whole = stored_rows(source, config, name)
            part = self.plan.part(name, shard, whole)
            self._num_rows[name] = len(whole)
            if map_dir is None:
                # A strided view would keep the whole table in memory.
                parts[name] = StoredRows(part.row_type, part.width, np.ascontiguousarray(part.data))
            else:
                parts[name] = part.spilled(map_dir / f"{source.version}.{shard}-of-{num_shards}.{name}.rows")
        self.num_bytes = {name: part.num_bytes for name, part in parts.items()}
        """table -> bytes of this shard's rows."""
        self._gather = shard_tables(parts, backend)

    def lookup(self, features: FeatureBatch) -> dict[str, npt.NDArray[np.float32]]:
        """Return what this shard gives of ``features.unique_rows``, unpooled.

        Returns:
            table -> float32 [U_s, D_s], in the order of ``unique_rows``; tables of which it holds nothing are left out.

        Raises:
            InvalidRequestError: a row that this shard would give is outside its table.
        """
        wanted = {}
        for name, num_rows in self._num_rows.items():
            unique = features.unique_rows[name]
            if name in self._hot:
                check_rows(name, unique, num_rows)
            wanted[name] = self.plan.wanted(name, self.shard, unique)
        try:
            return self._gather(wanted)
        except InvalidRequestError:
            # It knows the row of the part; say which row of the table that is.
            for name, num_rows in self._num_rows.items():
                check_rows(name, features.unique_rows[name], num_rows)
            raise
