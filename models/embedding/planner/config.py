"""What a plan is made of: cards, the store that they load from, requests and tables. Units are in the names."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Final, Self, TypeAlias

from pydantic import Field, model_validator

from models.config import Placement, RowType
from shared.config import Config

GB = 10**9

PLACED_MAX: Final = 500_000
"""Limit on cards times tables: what is worked out for each table and card takes tens of seconds then."""

Bandwidth: TypeAlias = Annotated[float, Field(ge=1e-6, le=1e9)]
"""GB/s; bounded, so that no figure made of it is infinite."""

Cost: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
"""Microseconds."""


def size(number: float, unit: str = "B") -> str:
    """Return a number with three digits that matter and a decimal prefix: ``66.9 GB``."""
    prefixes = ("", "k", "M", "G", "T", "P")
    power = min(int(math.log10(number) // 3), len(prefixes) - 1) if number >= 1 else 0
    scaled = number / 1000**power
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {prefixes[power]}{unit}"


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

    memory_gb: float = Field(gt=0, le=1e6)
    table_share: float = Field(0.8, gt=0, le=1)
    read_gb_s: Bandwidth
    link_gb_s: Bandwidth
    load_gb_s: Bandwidth
    call_us: Cost = 20.0
    table_us: Cost = 5.0
    lookup_us: Cost = 0.01

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

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}$")
    rows: int = Field(ge=1, le=10**15)
    width: int = Field(ge=1, le=2**20)
    row_type: RowType = "fp32"
    ids: float = Field(ge=1e-6)
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
    origin_gb_s: Bandwidth
    dense_gb: float = Field(0.0, ge=0, le=1e6)
    requests_s: float = Field(gt=0, le=1e12)
    replicate_share: float = Field(0.05, ge=0, le=1)
    load_s_max: float = Field(600.0, gt=0, le=1e12)
    tables: tuple[PlanTable, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        placed = self.num_cards * sum(table.count for table in self.tables)
        if placed > PLACED_MAX:
            raise ValueError(f"num_cards times tables must be at most {PLACED_MAX}, is {placed}")
        names = Counter(table.name for table in self.single_tables())
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"tables must have distinct names, {twice[0]} is there {names[twice[0]]} times")
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
