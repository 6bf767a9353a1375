"""Every row of every table has exactly one giver, and parts put together are the table."""

from __future__ import annotations

import numpy as np
import pytest

from models.config import Placement, RankerConfig, RowType
from models.embedding.plan import Placed, ShardPlan, choose_hot_rows
from models.embedding.quantized import StoredRows

KINDS: tuple[Placement, ...] = ("table_wise", "row_wise", "column_wise", "replicated")
HOT = np.array([3, 8, 9], np.int64)


def _plan(kind: Placement, num_shards: int, width: int = 8, *, hot: bool = False) -> ShardPlan:
    return ShardPlan(num_shards, width, {"t": Placed(kind, 5 % num_shards, HOT if hot else HOT[:0])})


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "hot"), [*((kind, False) for kind in KINDS), ("row_wise", True)])
@pytest.mark.parametrize("row_type", ["fp32", "int4"])
def test_parts_put_together_are_the_table(kind: Placement, hot: bool, num_shards: int, row_type: RowType) -> None:
    plan = _plan(kind, num_shards, hot=hot)
    weight = np.random.default_rng(0).standard_normal((23, 8)).astype(np.float32)
    whole = StoredRows.of(weight, row_type)
    rng = np.random.default_rng(num_shards)
    for rows in (np.arange(23), rng.integers(0, 23, 40), np.zeros(0, np.int64), np.array([22, 9, 9, 0])):
        found = np.full((len(rows), 8), np.nan, np.float32)
        for shard in range(num_shards):
            owned = plan.owned("t", shard, rows)
            first, last = plan.columns("t", shard)
            assert np.isnan(found[owned, first:last]).all()  # nobody else gave it
            part = plan.part("t", shard, whole)
            found[owned, first:last] = part.read(plan.local_rows("t", rows[owned]))
        np.testing.assert_array_equal(found, whole.read(rows))


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_resident_bytes_are_a_shards_share(kind: Placement, num_shards: int) -> None:
    plan = _plan(kind, num_shards, width=32)
    whole = StoredRows.of(np.zeros((1_003, 32), np.float32))
    held = [plan.part("t", shard, whole).num_bytes for shard in range(num_shards)]
    share: dict[Placement, list[float]] = {
        "row_wise": [whole.num_bytes / num_shards] * num_shards,
        "column_wise": [whole.num_bytes / num_shards] * num_shards,
        "replicated": [whole.num_bytes] * num_shards,
        "table_wise": [whole.num_bytes * (shard == 5 % num_shards) for shard in range(num_shards)],
    }
    np.testing.assert_allclose(held, share[kind], rtol=0.1)


def test_rows_that_several_shards_hold_level_the_load() -> None:
    rows = np.arange(0, 100, 2)  # even rows only: without hot rows all of them are shard 0's
    cold = ShardPlan(2, 8, {"t": Placed("row_wise")})
    hot = ShardPlan(2, 8, {"t": Placed("row_wise", hot=rows[:40])})
    replicated = ShardPlan(2, 8, {"t": Placed("replicated")})
    assert [int(plan.owned("t", 0, rows).sum()) for plan in (cold, hot, replicated)] == [50, 30, 25]


def test_the_configuration_decides() -> None:
    plan = ShardPlan.of(RankerConfig(), 2)
    assert plan.tables == ("item", "genre", "year")
    assert {name: placed.kind for name, placed in plan.placed.items()} == {
        "item": "row_wise",
        "genre": "table_wise",
        "year": "table_wise",
    }
    assert plan.tables_of(0) == ("item", "genre")
    assert plan.tables_of(1) == ("item", "year")


def test_a_table_may_name_its_shard_and_columns_may_run_out() -> None:
    config = RankerConfig()
    changes: dict[str, dict[str, object]] = {"genre": {"shard": 5}, "year": {"placement": "column_wise"}}
    tables = tuple(table.model_copy(update=changes.get(table.name, {})) for table in config.tables)
    plan = ShardPlan.of(config.model_copy(update={"tables": tables, "width": 4}), 4)
    assert plan.placed["genre"].owner == 1
    assert [plan.columns("year", shard) for shard in range(4)] == [(0, 0), (0, 2), (2, 2), (2, 4)]
    assert plan.tables_of(0) == ("item",)
    assert plan.tables_of(1) == ("item", "genre", "year")


@pytest.mark.parametrize(("placement", "field"), [("row_wise", "shard"), ("replicated", "hot_rows")])
def test_settings_of_another_placement_are_refused(placement: str, field: str) -> None:
    table = {"name": "item", "placement": placement, field: 1}
    others = [table.model_dump() for table in RankerConfig().tables if table.name != "item"]
    with pytest.raises(ValueError, match=f"for (table|row)_wise tables, item is {placement}"):
        RankerConfig.model_validate({"tables": [table, *others]})


def test_hot_rows_are_those_with_the_most_traffic() -> None:
    counts = np.array([0, 5, 9, 5, 0, 1])
    assert choose_hot_rows(counts, 2).tolist() == [1, 2]
    assert choose_hot_rows(counts, 3).tolist() == [1, 2, 3]
    assert choose_hot_rows(counts, 99).tolist() == [1, 2, 3, 5]
    assert choose_hot_rows(counts, 0).tolist() == []


def test_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards must be at least 1, is 0"):
        ShardPlan.of(RankerConfig(), 0)
