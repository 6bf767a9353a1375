"""What a placement costs each card: bytes that it holds, rows that it reads a request, bytes that it sends.

Traffic is Zipf's: the row of rank k is read by a share of the requests in proportion to ``k ** -zipf``, at most once a
request, since ids are distinct within one. Row ``r`` lives on card ``r % S`` and ranks are taken to be dealt the same
way, so the card of the top row has the most to do; hot rows, which all cards hold, are dealt evenly.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from models.config import Placement
from models.embedding.planner.config import CardConfig, PlanTable

HEAD_ROWS = 4_096
"""Ranks whose traffic is counted one by one; the tail is spread evenly."""

OUTPUT_BYTES = 4
"""Rows leave as fp32."""

ID_BYTES = 8

_ROW_HEAD_BYTES = {"fp32": 0, "fp16": 0, "int8": 4, "int4": 4}
_VALUE_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Load:
    """What one table asks of one card.

    Args:
        resident_bytes: Bytes that it holds.
        lookups: Rows that it reads a request.
        read_bytes: Bytes that it reads a request.
        sent_bytes: Bytes of rows and ids that travel a request.
    """

    resident_bytes: int = 0
    lookups: float = 0.0
    read_bytes: float = 0.0
    sent_bytes: float = 0.0

    def time_us(self, card: CardConfig) -> float:
        """Return what it costs the card a request, microseconds; 0 where it holds nothing."""
        if not self.resident_bytes:
            return 0.0
        # GB/s are thousands of bytes a microsecond.
        moved = self.read_bytes / (card.read_gb_s * 1e3) + self.sent_bytes / (card.link_gb_s * 1e3)
        return card.table_us + self.lookups * card.lookup_us + moved


def stored_row_bytes(table: PlanTable, width: int | None = None) -> int:
    """Return the bytes of a row, or of ``width`` columns of it."""
    return _ROW_HEAD_BYTES[table.row_type] + _VALUE_BITS[table.row_type] * (width or table.width) // 8


def table_bytes(table: PlanTable) -> int:
    """Return the bytes of the whole table."""
    return table.rows * stored_row_bytes(table)


def loads(table: PlanTable, kind: Placement, num_cards: int, owner: int = 0, hot_rows: int = 0) -> list[Load]:
    """Return what a table asks of every card.

    Args:
        table: The table.
        kind: Its placement.
        num_cards: S.
        owner: Card of a table-wise table.
        hot_rows: Rows of a row-wise table that all cards hold.
    """
    whole = stored_row_bytes(table)
    if kind == "table_wise":
        own = _load(table, table.rows * whole, table.ids, whole, table.width)
        return [own if card == owner else Load() for card in range(num_cards)]
    if kind == "replicated":
        return [_load(table, table.rows * whole, table.ids / num_cards, whole, table.width)] * num_cards
    if kind == "column_wise":
        unit = 1 if table.width % 2 else 2
        edges = [table.width // unit * card // num_cards * unit for card in range(num_cards + 1)]
        widths = [after - before for before, after in itertools.pairwise(edges)]
        found = {width: stored_row_bytes(table, width) for width in widths if width}
        return [
            _load(table, table.rows * found[width], table.ids, found[width], width) if width else Load()
            for width in widths
        ]
    reads = row_wise_lookups(table.ids, table.rows, table.zipf, num_cards, min(hot_rows, table.rows))
    held = [min(hot_rows, table.rows) + len(range(card, table.rows, num_cards)) for card in range(num_cards)]
    return [_load(table, rows * whole, lookups, whole, table.width) for rows, lookups in zip(held, reads, strict=True)]


def _load(table: PlanTable, resident: int, lookups: float, row_bytes: int, width: int) -> Load:
    return Load(resident, lookups, lookups * row_bytes, lookups * (width * OUTPUT_BYTES + ID_BYTES))


@lru_cache(maxsize=4_096)
def row_wise_lookups(ids: float, rows: int, zipf: float, num_cards: int, hot_rows: int) -> tuple[float, ...]:
    """Return how many rows each card reads a request when rows are dealt round the cards.

    Args:
        ids: Distinct rows of a request, on average.
        rows: R.
        zipf: Exponent.
        num_cards: S.
        hot_rows: Top ranks that all cards hold.
    """
    head = head_reads(ids, rows, zipf)
    dealt = [0.0] * num_cards
    for rank, reads in enumerate(head):
        if rank >= hot_rows:
            dealt[rank % num_cards] += reads
    even = (ids - sum(dealt)) / num_cards  # hot rows and the tail
    return tuple(even + reads for reads in dealt)


@lru_cache(maxsize=4_096)
def head_reads(ids: float, rows: int, zipf: float) -> tuple[float, ...]:
    """Return how often a request reads each of the top ranks: at most once, ``ids`` in all with the tail.

    Args:
        ids: Distinct rows of a request, on average.
        rows: R.
        zipf: Exponent.
    """
    num_head = min(rows, HEAD_ROWS)
    shares = [rank**-zipf for rank in range(1, num_head + 1)]
    total = sum(shares) + _tail(num_head, rows, zipf)
    # What the cap of one read takes from the top ranks, the others get: a few rounds settle it.
    scale = ids / total
    for _ in range(20):
        capped = sum(1 for share in shares if share * scale >= 1.0)
        rest = total - sum(shares[:capped])
        wanted = (ids - capped) / rest if rest > 0 and ids > capped else scale
        if wanted <= scale * (1 + 1e-9):
            break
        scale = wanted
    return tuple(min(share * scale, 1.0) for share in shares)


def _tail(num_head: int, rows: int, zipf: float) -> float:
    """Return the sum of ``k ** -zipf`` over ranks ``num_head + 1`` to ``rows``, as an integral."""
    if rows <= num_head:
        return 0.0
    low, high = num_head + 0.5, rows + 0.5
    if abs(zipf - 1.0) < 1e-9:
        return math.log(high / low)
    return float((high ** (1 - zipf) - low ** (1 - zipf)) / (1 - zipf))
