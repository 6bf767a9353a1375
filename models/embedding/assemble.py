"""Puts the rows of all shards together and pools them, once, in one order: any number of shards gives the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.embedding.plan import ShardPlan
from shared.errors import InvalidRequestError
from shared.schema.embeddings import EmbeddingRows, PooledEmbeddings
from shared.schema.features import FeatureBatch, JaggedIds

Floats = npt.NDArray[np.float32]


class Assembler:
    """Pools candidate embeddings from shard rows.

    Args:
        config: The ranker's configuration.
        oov_rows: table -> float32 [D], row 0 of each candidate-side table, which stands in for a missing shard.
        hot: table -> int64, ascending, its hot rows, see ``models.embedding.serving_rows``.
    """

    def __init__(
        self, config: RankerConfig, oov_rows: dict[str, Floats], hot: Mapping[str, npt.NDArray[np.int64]] | None = None
    ) -> None:
        self._config = config
        self._oov_rows = oov_rows
        self._hot = hot
        self._plans: dict[int, ShardPlan] = {}

    def pool(self, features: FeatureBatch, shards: Sequence[EmbeddingRows | None]) -> PooledEmbeddings:
        """Return one pooled embedding a candidate and feature.

        Args:
            features: C candidates.
            shards: Rows of each of the S shards, None where a shard gave none.

        Returns:
            Values float32 [C, F, D]; rows of a missing shard are their table's out-of-vocabulary row.

        Raises:
            InvalidRequestError: a shard's rows do not fit the features; names table and counts.
        """
        plan = self._plan(len(shards))
        tables = {name: self._table(name, features.unique_rows[name], shards, plan) for name in plan.tables}
        configs = self._config.candidate_features
        values = np.empty((features.num_candidates, len(configs), self._config.width), np.float32)
        for index, feature in enumerate(configs):
            _pool_mean(tables[feature.table], features.features[feature.name], values[:, index])
        missing = tuple(shard for shard, rows in enumerate(shards) if rows is None)
        return PooledEmbeddings(tuple(feature.name for feature in configs), values, missing)

    def _plan(self, num_shards: int) -> ShardPlan:
        if num_shards not in self._plans:
            self._plans[num_shards] = ShardPlan.of(self._config, num_shards, self._hot)
        return self._plans[num_shards]

    def _table(
        self, name: str, unique: npt.NDArray[np.int64], shards: Sequence[EmbeddingRows | None], plan: ShardPlan
    ) -> Floats:
        table = np.empty((len(unique), self._config.width), np.float32)
        for shard in range(plan.num_shards):
            owned = plan.owned(name, shard, unique)
            first, last = plan.columns(name, shard)
            num_owned, width = int(owned.sum()), last - first
            if not num_owned or not width:
                continue
            part = shards[shard]
            if part is None:
                table[owned, first:last] = self._oov_rows[name][first:last]
                continue
            rows = part.rows.get(name)
            if rows is None or rows.shape != (num_owned, width):
                found = None if rows is None else rows.shape
                raise InvalidRequestError(
                    f"shard {shard} must give {num_owned} rows of {width} of table {name}, gave {found}",
                    field=f"rows.{name}",
                    limit=num_owned,
                    value=str(found),
                )
            table[owned, first:last] = rows
        return table


def _pool_mean(table: Floats, ids: JaggedIds, out: Floats) -> None:
    """Write the mean of each candidate's rows into ``out`` [C, D]; the zero vector where it has none."""
    counts = np.diff(ids.offsets)
    if len(ids.values) == len(counts) and bool((counts == 1).all()):
        out[:] = table[ids.values]
        return
    out[:] = 0.0
    filled = np.flatnonzero(counts)
    if len(filled):
        # Slices of candidates without ids are empty, so the starts of the others bound one another.
        sums = np.add.reduceat(table[ids.values], ids.offsets[:-1][filled], axis=0)
        out[filled] = sums / counts[filled, None].astype(np.float32)
