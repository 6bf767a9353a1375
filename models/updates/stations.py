"""The stations' halves of the model over weights that change while they serve: shard, request encoder, ranker.

What hangs on a state is built beside the one that serves, and only if what it is made of changed: an update that brings
rows alone costs a station without tables nothing, and no network is packed again for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.calibration import GROUP as DENSE
from models.config import RankerConfig, TableBackend
from models.embedding import catalog, vocabulary
from models.embedding.serving_rows import PLACEMENT_GROUP
from models.embedding.tables import group
from models.embedding.vocabulary import OOV_ROW
from models.execution_config import Execution
from models.features import FeatureExtractor
from models.golden import DOCUMENT, Golden
from models.quantize.plan import PrecisionPlan
from models.request_tables import RowLookup
from models.stations import CandidateRanker, RequestEncoder
from models.updates.arena import Ids
from models.updates.live import LiveConfig, LiveState
from models.updates.series import GOLDEN, LiveSeries
from models.updates.shard import LiveTableShard
from models.updates.source import LiveSource, held_rows, live_weights
from shared.schema.features import FeatureBatch
from shared.weights import WeightReader
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import tensor_key

INDEX_GROUPS = (vocabulary.GROUP, catalog.GROUP)


class ShardState:
    """One state of a shard.

    Args:
        shard: The shard.
        state: The state.
    """

    def __init__(self, shard: LiveTableShard, state: LiveState) -> None:
        self._shard = shard
        self._state = state

    @property
    def num_bytes(self) -> dict[str, int]:
        """Table -> bytes of this shard's rows, spare ones included."""
        return self._shard.num_bytes

    def lookup(self, features: FeatureBatch) -> dict[str, npt.NDArray[np.float32]]:
        """See ``LiveTableShard.lookup``."""
        return self._shard.lookup(features, self._state)


def shard_series(
    reader: WeightReader,
    log: DeltaLog,
    shard: int,
    num_shards: int,
    backend: TableBackend,
    config: LiveConfig,
    map_dir: Path | None = None,
) -> LiveSeries[ShardState]:
    """Return one shard of a version that follows its deltas, once it has given the golden rows.

    Args:
        reader: The version.
        log: Its deltas.
        shard: This shard, from 0.
        num_shards: S.
        backend: How rows are looked up.
        config: Limits of the updates.
        map_dir: Folder for rows that do not fit into memory; None: they do.
        map_dir: See ``LiveTableShard``.

    Raises:
        WeightsError: the weights do not load, or a row differs.
    """
    tables = LiveTableShard(reader, shard, num_shards, config, backend=backend, map_dir=map_dir, check_golden=True)
    return LiveSeries(tables.weights, log, lambda state: ShardState(tables, state))


def encoder_series(
    reader: WeightReader, log: DeltaLog, execution: Execution, config: LiveConfig
) -> LiveSeries[RequestEncoder]:
    """Return the request-only path of a version that follows its deltas, once it has answered the golden request.

    Args:
        reader: The version.
        log: Its deltas.
        execution: Kernels and dtype.
        config: Limits of the updates.

    Raises:
        WeightsError: the weights do not load, or an answer differs.
    """
    model = RankerConfig.model_validate(reader.json("model"))
    used = dict.fromkeys(["item", "genre", *(feature.table for feature in model.request_features)])

    def build(state: LiveState, before: LiveState | None) -> RequestEncoder:
        source = LiveSource(reader, state, in_part=True)
        encoder: RequestEncoder
        is_new = before is None or state.differs(before, DENSE, *INDEX_GROUPS)
        encoder = RequestEncoder(source, execution, _unbound) if before is None or is_new else before.built
        if (is_current := before is None or state.differs(before, GOLDEN)) or is_new:
            golden = Golden.from_weights(source, is_current=is_current)
            golden.check_encoder(encoder.reading(rows_of(state)))
        return encoder

    groups = [DENSE, GOLDEN, *INDEX_GROUPS, *map(group, used)]
    weights = live_weights(reader, groups, config, build=build, documents=[DOCUMENT])
    return LiveSeries(weights, log, lambda state: state.built.reading(rows_of(state)))


def ranker_series(
    reader: WeightReader, log: DeltaLog, execution: Execution, plan: PrecisionPlan | None, config: LiveConfig
) -> LiveSeries[CandidateRanker]:
    """Return the candidate path of a version that follows its deltas, once it has answered the golden request.

    Of each table it holds the row for ids out of vocabulary, no other.

    Args:
        reader: The version.
        log: Its deltas.
        execution: Kernels and dtype.
        plan: Number formats of the layers of this version; None: none.
        config: Limits of the updates.

    Raises:
        WeightsError: the weights do not load, or an answer differs.
    """
    model = RankerConfig.model_validate(reader.json("model"))
    tables = [group(table.name) for table in model.tables]
    placement = [PLACEMENT_GROUP] if PLACEMENT_GROUP in reader.groups() else []

    def build(state: LiveState, before: LiveState | None) -> CandidateRanker:
        source = LiveSource(reader, state, in_part=True)
        ranker: CandidateRanker
        is_new = before is None or state.differs(before, DENSE, *tables, *placement)
        ranker = CandidateRanker.from_weights(source, execution, plan) if before is None or is_new else before.built
        if (is_current := before is None or state.differs(before, GOLDEN)) or is_new:
            golden = Golden.from_weights(source, is_current=is_current)
            golden.check_ranker(ranker, FeatureExtractor.from_weights(source))
        return ranker

    unknown = {tensor_key(table, "weight"): np.array([OOV_ROW]) for table in tables}
    groups = [DENSE, GOLDEN, *INDEX_GROUPS, *placement, *tables]
    weights = live_weights(reader, groups, config, select=held_rows(unknown), build=build, documents=[DOCUMENT])
    return LiveSeries(weights, log, lambda state: state.built)


def rows_of(state: LiveState) -> RowLookup:
    """Return the look-up of a state's tables; holds the state."""
    return lambda table, rows: state.lookup(tensor_key(group(table), "weight"), rows)


def _unbound(table: str, rows: Ids) -> npt.NDArray[np.float32]:
    raise LookupError(f"table {table} is read through a state: give the encoder one by reading()")
