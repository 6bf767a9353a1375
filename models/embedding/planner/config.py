"""What a plan is made of: cards, the store that they load from, requests and tables. Units are in the names."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from models.config import Placement, RowType
from shared.config import Config

GB = 10**9


class CardConfig(Config):
    """One card; on a CPU mesh, the process of one shard.

    Args:
        memory_gb: Memory.
        table_share: Share of it that tables may fill; the rest is for dense weights, activations and buffers.
        read_gb_s: Bandwidth at which random rows are read.
        link_gb_s: Bandwidth at which rows leave for the reader.
        load_gb_s: Bandwidth at which weights arrive.
        call_us: Cost of answering one request at all.
        table_us: Cost of one more table in the answer.
        lookup_us: Cost of one row besides reading its bytes.
    """

    memory_gb: float = Field(gt=0)
    table_share: float = Field(0.8, gt=0, le=1)
    read_gb_s: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)
    load_gb_s: float = Field(gt=0)
    call_us: float = Field(20.0, ge=0)
    table_us: float = Field(5.0, ge=0)
    lookup_us: float = Field(0.01, ge=0)

    @property
    def table_bytes(self) -> int:
        """Bytes of tables that fit."""
        return int(self.memory_gb * self.table_share * GB)


class PlanTable(Config):
    """One table, or several alike.

    Args:
        name: Table name; several get ``.0``, ``.1`` and so on.
        rows: R.
        width: D.
        row_type: How rows are stored; they leave as fp32 whatever it is.
        ids: Distinct rows that a request reads, on average.
        zipf: Exponent of the traffic by rank; 0: all rows alike.
        count: Tables like this one.
        placement: What it must be; None: what costs least.
    """

    name: str
    rows: int = Field(ge=1)
    width: int = Field(ge=1)
    row_type: RowType = "fp32"
    ids: float = Field(gt=0)
    zipf: float = Field(1.0, ge=0, le=3)
    count: int = Field(1, ge=1, le=10_000)
    placement: Placement | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ids > self.rows:
            raise ValueError(f"ids of table {self.name} must be at most its rows {self.rows}, are {self.ids}")
        if self.row_type == "int4" and self.width % 2:
            raise ValueError(f"width of int4 table {self.name} must be even, is {self.width}")
        return self


class PlanConfig(Config):
    """A cluster and its tables.

    Args:
        num_cards: S.
        card: Each of them.
        origin_gb_s: Bandwidth of the store that all cards load from; bytes that several cards need leave it once.
        dense_gb: Weights that are no tables, on every card, loaded first.
        requests_s: Requests a second that must be answered.
        replicate_share: Most of a card's table bytes that copies (replicated tables, hot rows) may take.
        load_s_max: Longest load that is acceptable.
        tables: The tables.
    """

    num_cards: int = Field(ge=1, le=4096)
    card: CardConfig
    origin_gb_s: float = Field(gt=0)
    dense_gb: float = Field(0.0, ge=0)
    requests_s: float = Field(gt=0)
    replicate_share: float = Field(0.05, ge=0, le=1)
    load_s_max: float = Field(600.0, gt=0)
    tables: tuple[PlanTable, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"tables must have distinct names, are {names}")
        return self

    def single_tables(self) -> list[PlanTable]:
        """Return the tables one by one."""
        found: list[PlanTable] = []
        for table in self.tables:
            if table.count == 1:
                found.append(table)
                continue
            found += [
                table.model_copy(update={"name": f"{table.name}.{index}", "count": 1}) for index in range(table.count)
            ]
        return found
