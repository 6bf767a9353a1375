"""One shard of the tables whose rows change while it serves: ``TableShard`` over ``LiveWeights``."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig, TableBackend
from models.embedding.plan import ShardPlan
from models.embedding.quantized import StoredRows
from models.embedding.serving_rows import hot_rows, rows_group
from models.embedding.shard_tables import FbgemmTables, TableForm, check_rows
from models.embedding.tables import group
from models.golden import DOCUMENT, Golden
from models.source import WeightSource
from models.updates.arena import Array, Ids, MakeStorage
from models.updates.live import Build, Convert, LiveConfig, LiveState, LiveWeights
from models.updates.source import LiveSource, held_rows, live_weights
from shared.clock import Clock
from shared.errors import WeightsError
from shared.schema.features import FeatureBatch
from shared.weights.deltas import tensor_key


class LiveTableShard:
    """One shard's part of the candidate-side tables, in memory or mapped, updated in place.

    Gives what ``TableShard`` gives of a version with the same tensors, bit for bit, with either backend.

    Args:
        source: The version; must be able to list its tensors.
        shard: This shard, from 0.
        num_shards: S.
        config: Limits of the updates.
        clock: For the status.
        backend: How rows are looked up: ``fbgemm``: by its operator, in whose memory the rows are updated;
            ``reference``: one numpy gather a table.
        map_dir: Folder in which the rows are put, to be read and written there page by page: for tables that do not
            fit into memory, with backend ``reference``. None: they are in memory.
        check_golden: Refuse states that do not give the golden rows that the version, or the delta itself, brings.

    Raises:
        ValueError: ``shard`` is not in ``[0, num_shards)``.
        WeightsError: the weights do not have the rows that the model asks for, rows in files were asked of FBGEMM, or
            the folder has no room for them.
    """

    def __init__(
        self,
        source: WeightSource,
        shard: int,
        num_shards: int,
        config: LiveConfig | None = None,
        clock: Clock | None = None,
        *,
        backend: TableBackend = "reference",
        map_dir: Path | None = None,
        check_golden: bool = False,
    ) -> None:
        if not 0 <= shard < num_shards:
            raise ValueError(f"shard must be in [0, {num_shards}), is {shard}")
        if map_dir is not None and backend != "reference":
            raise WeightsError(f"rows that are mapped from a file need backend reference, is {backend}")
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
        forms: dict[str, TableForm] = {}
        config = config or LiveConfig()
        for name in self.plan.tables_of(shard):
            row_type = model.table(name).row_type
            stored_in, tensor = (group(name), "weight") if row_type == "fp32" else (rows_group(name), "rows")
            key = self._keys[name] = tensor_key(stored_in, tensor)
            groups.append(stored_in)
            num_local = self._num_rows[name] = len(source.tensors(stored_in)[tensor])
            if self.plan.placed[name].kind == "row_wise":
                own = np.arange(shard, self._num_rows[name], num_shards)
                held[key] = np.concatenate([self._hot.get(name, own[:0]), own])
                num_local = len(held[key])
            first, last = self.plan.columns(name, shard)
            if (first, last) != (0, model.width):
                convert[key] = self._columns_of(name)
            forms[name] = TableForm(row_type, last - first, config.storage_rows(num_local))
        self._tables = FbgemmTables(forms) if backend == "fbgemm" and forms else None
        golden = [DOCUMENT] if check_golden else []
        self.weights: LiveWeights = live_weights(
            source,
            [*groups, *golden],
            config,
            select=held_rows(held),
            convert=convert,
            build=self._checked_against(source) if check_golden else None,
            documents=golden,
            make_storage=self._memory(map_dir),
            clock=clock,
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
        wanted: dict[str, Ids] = {}
        for name, num_rows in self._num_rows.items():
            unique = features.unique_rows[name]
            check_rows(name, unique, num_rows)
            wanted[name] = state.places(self._keys[name], self.plan.wanted(name, self.shard, unique))
        if self._tables is not None:
            return self._tables.read(wanted)
        return {name: self._read(name, state.at_places(self._keys[name], rows)) for name, rows in wanted.items()}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Table -> bytes of this shard's rows, spare ones included."""
        return {name: self.weights.state.storage_bytes(key) for name, key in self._keys.items()}

    def _checked_against(self, source: WeightSource) -> Build:
        def build(state: LiveState, before: LiveState | None) -> None:
            if before is None or state.differs(before, DOCUMENT):
                golden = Golden.from_weights(LiveSource(source, state, in_part=True))
                golden.check_rows(self.lookup(golden.row_batch(), state), self.plan, self.shard)

        return build

    def _memory(self, map_dir: Path | None) -> dict[str, MakeStorage] | None:
        """Return what gives ``LiveWeights`` the operator's memory, or files; None: it makes its own."""
        if map_dir is not None:
            return {key: _mapped_in(map_dir) for key in self._keys.values()}
        if (tables := self._tables) is None:
            return None
        return {key: _maker(tables.storage(name)) for name, key in self._keys.items()}

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


def _maker(storage: Array) -> MakeStorage:
    """Return what hands out memory that is there already, of the size that ``LiveConfig.storage_rows`` foretold."""
    return lambda shape, dtype: storage


def _mapped_in(folder: Path) -> MakeStorage:
    """Return what maps a file of this process's own, which is gone with it: replicas of a shard share none."""

    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="rows-") as file:
                # Room is taken now: a write to a page that a full disk cannot hold would end the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return np.asarray(np.memmap(file, dtype, mode="r+", shape=shape))
        except OSError as error:
            raise WeightsError(
                f"cannot map {num_bytes} bytes of rows in {folder}: {error.strerror}", file=str(folder)
            ) from error

    return make
