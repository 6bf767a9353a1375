"""A shard that is updated in place gives what a shard of the new version gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.config import Placement, RankerConfig, RowType, TableBackend, TableConfig
from models.embedding.serving_rows import with_serving_rows
from models.embedding.table_shard import TableShard
from models.embedding.tables import table_weight
from models.features import FeatureExtractor
from models.random_weights import TINY
from models.source import MemorySource
from models.updates.live import LiveConfig
from models.updates.shard import LiveTableShard
from shared.errors import InvalidRequestError, VersionMismatchError, WeightsError
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.weights.state import TensorState
from tests.helpers.weights import random_weights

STAMP = Stamp("r", "random", "test", "0", 0.0)
KINDS: tuple[tuple[Placement, int, RowType], ...] = (
    ("table_wise", 0, "fp32"),
    ("row_wise", 0, "fp32"),
    ("row_wise", 5, "int8"),
    ("column_wise", 0, "fp32"),
    ("column_wise", 0, "int4"),
    ("replicated", 0, "fp16"),
)


def version(kind: Placement, hot: int, row_type: RowType, seed: int) -> MemorySource:
    """A version of one form; the seed decides the rows, not which of them are hot."""
    tables = tuple(
        TableConfig(name=table.name, placement=kind, hot_rows=hot, row_type=row_type)
        if table.name in TINY.candidate_tables
        else table
        for table in TINY.tables
    )
    config: RankerConfig = TINY.model_copy(update={"tables": tables})
    source = random_weights(TINY, seed=0, golden=False)
    rng = np.random.default_rng(seed)
    for name in TINY.candidate_tables if seed else ():
        weight = source.groups[f"tables/{name}"]["weight"].copy()
        rows = rng.permutation(len(weight))[: len(weight) // 2]
        weight[rows] = rng.random((len(rows), weight.shape[1]), np.float32)
        source.groups[f"tables/{name}"] = {"weight": weight}
    source.documents["model"] = config.model_dump(mode="json")
    traffic = {name: np.arange(len(table_weight(source, name))) for name in TINY.candidate_tables}
    return with_serving_rows(source, traffic)


def features(source: MemorySource) -> FeatureBatch:
    known = [int(key) for key in source.tensors("catalog")["item_keys"]]
    return FeatureExtractor.from_weights(source).extract_ids([*known, 2**40]).stamped(STAMP)


def answer(shard: Any, batch: FeatureBatch) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in shard.lookup(batch).items()}


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize(("kind", "hot", "row_type"), KINDS)
@pytest.mark.parametrize("backend", ["reference", "fbgemm"])
def test_updated_in_place_or_built_anew(
    kind: Placement, hot: int, row_type: RowType, num_shards: int, backend: TableBackend
) -> None:
    base, batch = version(kind, hot, row_type, 0), features(version(kind, hot, row_type, 0))
    config = LiveConfig(block_rows=4)
    live = [LiveTableShard(base, shard, num_shards, config, backend=backend) for shard in range(num_shards)]
    trainer = TensorState(base.version, base.groups, {})
    stamps, states = ["random"], [base]
    for seed in (1, 2):
        target = version(kind, hot, row_type, seed)
        delta = trainer.step(target.groups, "now")
        assert not delta.whole
        trainer.apply(delta)
        stamps.append(delta.stamp)
        states.append(target)
        for shard in live:
            shard.weights.apply(delta)
    for stamp, state in zip(stamps, states, strict=True):
        for number, shard in enumerate(live):
            expected = answer(TableShard(state, number, num_shards), batch)
            kept = shard.weights.at(stamp)
            assert {name: rows.tobytes() for name, rows in shard.lookup(batch, kept).items()} == expected
            assert (answer(shard, batch) == expected) is (stamp == stamps[-1] or not expected)
    for number, shard in enumerate(live):
        shard.weights.roll_back("random")
        assert answer(shard, batch) == answer(TableShard(base, number, num_shards), batch)


def test_rows_in_files_are_updated_in_place(tmp_path: Path) -> None:
    base, target = version("row_wise", 5, "int8", 0), version("row_wise", 5, "int8", 1)
    batch, folder = features(base), tmp_path / "rows"
    shards = [LiveTableShard(base, shard, 2, LiveConfig(block_rows=4), map_dir=folder) for shard in range(2)]
    assert list(folder.iterdir()) == [], "the files have no name, and are gone with the process"
    trainer = TensorState(base.version, base.groups, {})
    for shard in shards:
        shard.weights.apply(trainer.step(target.groups, "now"))
        assert answer(shard, batch) == answer(TableShard(target, shard.shard, 2), batch)
    with pytest.raises(WeightsError, match="need backend reference, is fbgemm"):
        LiveTableShard(base, 0, 2, backend="fbgemm", map_dir=folder)
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"cannot map \d+ bytes of rows"):
        LiveTableShard(base, 0, 2, map_dir=tmp_path / "file" / "rows")


@pytest.mark.parametrize("backend", ["reference", "fbgemm"])
def test_what_a_shard_refuses(backend: TableBackend) -> None:
    base = version("row_wise", 0, "fp32", 0)
    shard = LiveTableShard(base, 0, 2, backend=backend)
    batch = features(base)
    batch.unique_rows["item"][-1] = 10**6
    with pytest.raises(InvalidRequestError, match=r"rows of table item must be in \[0, 41\)"):
        shard.lookup(batch)
    with pytest.raises(VersionMismatchError):
        shard.weights.at("random+1")
    with pytest.raises(ValueError, match=r"shard must be in \[0, 2\), is 2"):
        LiveTableShard(base, 2, 2)
