"""One shard of the tables whose rows change while it serves: ``TableShard`` over ``LiveWeights``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.embedding.plan import ShardPlan
from models.embedding.quantized import StoredRows
from models.embedding.serving_rows import hot_rows, rows_group
from models.embedding.shard_tables import check_rows
from models.embedding.tables import group
from models.source import WeightSource
from models.updates.arena import Array, Ids
from models.updates.live import Convert, LiveConfig, LiveState, LiveWeights
from models.updates.source import held_rows, live_weights
from shared.clock import Clock
from shared.schema.features import FeatureBatch
from shared.weights.deltas import tensor_key


class LiveTableShard:
    """One shard's part of the candidate-side tables, in memory, updated in place.

    Gives what ``TableShard`` with backend ``reference`` gives of a version with the same tensors, bit for bit.

    Args:
        source: The version; must be able to list its tensors.
        shard: This shard, from 0.
        num_shards: S.
        config: Limits of the updates.
        clock: For the status.

    Raises:
        ValueError: ``shard`` is not in ``[0, num_shards)``.
        WeightsError: the weights do not have the rows that the model asks for.
    """

    def __init__(
        self,
        source: WeightSource,
        shard: int,
        num_shards: int,
        config: LiveConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be in [0, {num_shards}), is {shard}")
        model = RankerConfig.model_validate(source.json("model"))
        self.shard = shard
        self._model = model
        self._hot = hot_rows(source, model)
        self.plan = ShardPlan.of(model, num_shards, self._hot)
        self._keys: dict[str, str] = {}
        self._num_rows: dict[str, int] = {}
        held: dict[str, Ids] = {}
        convert: dict[str, Convert] = {}
        groups: list[str] = []
        for name in self.plan.tables_of(shard):
            stored_in, tensor = (
                (group(name), "weight") if model.table(name).row_type == "fp32" else (rows_group(name), "rows")
            )
            key = self._keys[name] = tensor_key(stored_in, tensor)
            groups.append(stored_in)
            self._num_rows[name] = len(source.tensors(stored_in)[tensor])
            if self.plan.placed[name].kind == "row_wise":
                own = np.arange(shard, self._num_rows[name], num_shards)
                held[key] = np.concatenate([self._hot.get(name, own[:0]), own])
            if self.plan.columns(name, shard) != (0, model.width):
                convert[key] = self._columns_of(name)
        self.weights: LiveWeights = live_weights(
            source, groups, config, select=held_rows(held), convert=convert, clock=clock
        )

    def lookup(self, features: FeatureBatch, state: LiveState | None = None) -> dict[str, npt.NDArray[np.float32]]:
        """Return what this shard gives of ``features.unique_rows``, unpooled.

        Args:
            features: The candidates.
            state: The state that the request uses, from ``weights.at``; None: the newest.

        Returns:
            table -> float32 [U_s, D_s], in the order of ``unique_rows``; tables of which it holds nothing are left out.

        Raises:
            InvalidRequestError: a row that this shard would give is outside its table.
        """
        state = state or self.weights.state
        found: dict[str, npt.NDArray[np.float32]] = {}
        for name, key in self._keys.items():
            unique = features.unique_rows[name]
            check_rows(name, unique, self._num_rows[name])
            rows = state.lookup(key, self.plan.wanted(name, self.shard, unique))
            found[name] = self._read(name, rows)
        return found

    def _read(self, name: str, rows: Array) -> npt.NDArray[np.float32]:
        first, last = self.plan.columns(name, self.shard)
        row_type = self._model.table(name).row_type
        if row_type == "fp32":
            return rows
        return StoredRows(row_type, last - first, rows).read(np.arange(len(rows)))

    def _columns_of(self, name: str) -> Convert:
        row_type, width = self._model.table(name).row_type, self._model.width
        first, last = self.plan.columns(name, self.shard)
        return lambda rows: StoredRows(row_type, width, rows).columns(first, last).data
