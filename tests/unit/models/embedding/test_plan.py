"""Every row of every table has exactly one owner, and parts put together are the table."""

from __future__ import annotations

import numpy as np
import pytest

from models.config import RankerConfig
from models.embedding.plan import ShardPlan


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_every_row_has_one_owner(num_shards: int) -> None:
    plan = ShardPlan.of(RankerConfig(), num_shards)
    rows = np.arange(11, dtype=np.int64)
    for table in plan.tables:
        owners = np.stack([plan.owned(table, shard, rows) for shard in range(num_shards)])
        assert (owners.sum(axis=0) == 1).all()
        for shard in range(num_shards):
            assert (table in plan.tables_of(shard)) or not owners[shard].any()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_local_rows_find_the_rows_of_the_table(num_shards: int) -> None:
    plan = ShardPlan.of(RankerConfig(), num_shards)
    weight = np.arange(22, dtype=np.float32).reshape(11, 2)
    rows = np.arange(11, dtype=np.int64)
    for table in plan.tables:
        for shard in range(num_shards):
            owned = rows[plan.owned(table, shard, rows)]
            part = plan.part(table, shard, weight)
            np.testing.assert_array_equal(part[plan.local_rows(table, owned)], weight[owned])


def test_only_tables_of_candidates_are_placed() -> None:
    plan = ShardPlan.of(RankerConfig(), 2)
    assert plan.tables == ("item", "genre", "year")
    assert plan.owner == {"genre": 0, "year": 1}


def test_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards must be at least 1, is 0"):
        ShardPlan.of(RankerConfig(), 0)
