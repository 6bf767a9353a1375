"""What the shards need of published weights: rows as they are served, and which rows are hot.

A table with a ``row_type`` other than fp32 is published twice: as the rows that the shards hold (group
``rows/<table>``), and as the float32 values that these rows stand for (group ``tables/<table>``), so that the oracle,
the golden request and the stations that keep tables of their own compute with exactly what the shards serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from models.embedding.plan import RowIds, choose_hot_rows
from models.embedding.quantized import StoredRows
from models.embedding.tables import group, table_weight
from models.source import MemorySource, WeightSource, tensor
from shared.errors import WeightsError

PLACEMENT_GROUP = "placement"


def rows_group(table: str) -> str:
    """Return the weight group of the rows of a table as shards hold them."""
    return f"rows/{table}"


def with_serving_rows(
    source: MemorySource, traffic: Mapping[str, npt.NDArray[np.integer]] | None = None
) -> MemorySource:
    """Return the weights with what the shards need; where the model asks for nothing special, unchanged.

    Call it before a golden request is added: the values of quantized tables change.

    Args:
        source: Weights with fp32 tables.
        traffic: table -> integers [rows], how often each row is read, for tables with hot rows.

    Raises:
        WeightsError: a table has hot rows and no traffic, or traffic of another length, or values that its type cannot
            hold.
    """
    config = RankerConfig.model_validate(source.json("model"))
    groups = dict(source.groups)
    hot: dict[str, RowIds] = {}
    for name in config.candidate_tables:
        table, weight = config.table(name), table_weight(source, name)
        if table.row_type != "fp32":
            stored = StoredRows.of(weight, table.row_type)
            groups[rows_group(name)] = {"rows": stored.data}
            groups[group(name)] = {"weight": stored.read(np.arange(len(stored)))}
        if table.hot_rows:
            counts = (traffic or {}).get(name)
            if counts is None or len(counts) != len(weight):
                found = "none" if counts is None else str(len(counts))
                raise WeightsError(
                    f"table {name} has hot rows: its traffic must have {len(weight)} counts, has {found}"
                )
            hot[f"{name}.hot"] = choose_hot_rows(counts, table.hot_rows)
    if hot:
        groups[PLACEMENT_GROUP] = dict(hot)
    return replace(source, groups=groups)


def stored_rows(source: WeightSource, config: RankerConfig, table: str) -> StoredRows:
    """Read a table as the shards hold it.

    Raises:
        WeightsError: the rows are missing or are not what the model says.
    """
    row_type = config.table(table).row_type
    if row_type == "fp32":
        return StoredRows.of(table_weight(source, table))
    return StoredRows(row_type, config.width, tensor(source, rows_group(table), "rows"))


def hot_rows(source: WeightSource, config: RankerConfig) -> dict[str, RowIds]:
    """Read which rows of which tables are hot: table -> int64, ascending; only tables that have some.

    Raises:
        WeightsError: the model has hot rows and the weights do not say which.
    """
    names = [name for name in config.candidate_tables if config.table(name).hot_rows]
    return {name: tensor(source, PLACEMENT_GROUP, f"{name}.hot", np.int64) for name in names}
