"""How many rows each hashed table gets under one budget of bytes: most where a row buys most.

Cost of a table of H rows, read by the ids of one feature with traffic shares p (summing to 1): the share of what its
rows learn that is not the id's own, averaged over the traffic. With uniform hashing an id meets foreign traffic
``m_v = (1 - p_v) / H`` in its row, hence::

    dilution(H) = sum_v p_v * m_v / (m_v + p_v)

It falls and is convex in H for every p, so that giving the next row to whoever gains most a byte is optimal. The often
quoted chance that an id shares its row with any other, ``1 - (1 - 1/H)^(n - 1)``, is neither of use here (it is the
same for every id, so traffic drops out) nor convex below H = n / 2, where a greedy choice goes wrong.

No table gets more rows than it has ids: beyond, rows stay empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError

_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class Demand:
    """What one feature asks of its table; ids of equal traffic are kept once.

    Args:
        name: Feature name.
        row_bytes: Bytes of a row.
        shares: float64 [K], distinct traffic shares of an id, over 0.
        multiplicities: int64 [K], ids that have each share.
        weight: Importance of the feature; its traffic, or what shuffling its column costs.
    """

    name: str
    row_bytes: int
    shares: npt.NDArray[np.float64]
    multiplicities: npt.NDArray[np.int64]
    weight: float = 1.0

    @classmethod
    def of(cls, name: str, counts: npt.NDArray[np.integer], row_bytes: int, weight: float = 1.0) -> Self:
        """Make a demand of counts by id.

        Args:
            name: Feature name.
            counts: integers [ids], how often each id was read; ids that never were are left out.
            row_bytes: Bytes of a row, at least 1.
            weight: Importance, finite and at least 0.

        Raises:
            ValueError: no id was ever read, or a value is out of range.
        """
        seen = counts[counts > 0]
        if not len(seen):
            raise ValueError(
                f"counts of feature {name} must have an id that was read, have {len(counts)} that were not"
            )
        if row_bytes < 1 or not 0.0 <= weight < np.inf:
            raise ValueError(f"row_bytes must be at least 1 and weight at least 0, are {row_bytes} and {weight}")
        distinct, multiplicities = np.unique(seen, return_counts=True)
        return cls(name, row_bytes, distinct / seen.sum(), multiplicities.astype(np.int64), weight)

    @property
    def num_ids(self) -> int:
        """Distinct ids, the most rows that are of use."""
        return int(self.multiplicities.sum())

    def cost(self, num_rows: int) -> float:
        """Return ``weight * dilution(num_rows)``."""
        others = 1.0 - self.shares
        return self.weight * float(
            (self.multiplicities * self.shares * others / (others + self.shares * num_rows)).sum()
        )

    def gain(self, num_rows: int) -> float:
        """Return how much the cost falls with the row after ``num_rows``, by byte; 0 where every id has a row."""
        if num_rows >= self.num_ids:
            return 0.0
        # The difference of two costs, term by term in closed form: subtracting them would lose it in large tables.
        others = 1.0 - self.shares
        held = others + self.shares * num_rows
        fall = (self.multiplicities * self.shares**2 * others / (held * (held + self.shares))).sum()
        return self.weight * float(fall) / self.row_bytes


def allocate(demands: Sequence[Demand], budget_bytes: int) -> dict[str, int]:
    """Return the rows of each table of least total cost within the budget.

    Bisects the price of a byte down to where the budget is nearly spent, then gives single rows. With equal row bytes
    the result is optimal; with unequal ones it is within one row of it.

    Args:
        demands: Features, names distinct.
        budget_bytes: Most bytes of all tables.

    Returns:
        feature -> rows, 1 to its number of ids.

    Raises:
        ConfigError: the budget does not hold one row of each table.
    """
    _check(demands, budget_bytes)
    too_cheap, price = 0.0, max(demand.gain(1) for demand in demands) + np.finfo(np.float64).tiny
    rows = {demand.name: 1 for demand in demands}
    for _ in range(_BISECTIONS):
        middle = (too_cheap + price) / 2 if too_cheap else price / 16
        wanted = {demand.name: _rows_at(demand, middle) for demand in demands}
        if _bytes(demands, wanted) <= budget_bytes:
            rows, price = wanted, middle
            if middle < np.finfo(np.float64).tiny * 1e3:
                break
        else:
            too_cheap = middle
        if too_cheap and price - too_cheap <= 1e-12 * price:
            break
    return _spend_rest(demands, rows, budget_bytes)


def proportional(demands: Sequence[Demand], budget_bytes: int) -> dict[str, int]:
    """Return rows in proportion to the number of ids, the usual way and the one to beat.

    Args:
        demands: Features, names distinct.
        budget_bytes: Most bytes of all tables.

    Returns:
        feature -> rows, 1 to its number of ids.

    Raises:
        ConfigError: the budget does not hold one row of each table.
    """
    _check(demands, budget_bytes)
    share = min(budget_bytes / sum(demand.num_ids * demand.row_bytes for demand in demands), 1.0)
    rows = {demand.name: max(int(demand.num_ids * share), 1) for demand in demands}
    while _bytes(demands, rows) > budget_bytes:  # tables that were lifted to one row: the largest give way
        largest = max(demands, key=lambda demand: rows[demand.name] * demand.row_bytes * (rows[demand.name] > 1))
        over = _bytes(demands, rows) - budget_bytes
        rows[largest.name] = max(rows[largest.name] - -(-over // largest.row_bytes), 1)
    return rows


def _check(demands: Sequence[Demand], budget_bytes: int) -> None:
    names = [demand.name for demand in demands]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"demands must be of distinct features, at least one, are {names}", field="demands")
    least = sum(demand.row_bytes for demand in demands)
    if budget_bytes < least:
        raise ConfigError(
            f"budget_bytes must hold one row of each table, at least {least}, is {budget_bytes}",
            field="budget_bytes",
            limit=least,
            value=budget_bytes,
        )


def _bytes(demands: Sequence[Demand], rows: dict[str, int]) -> int:
    return sum(rows[demand.name] * demand.row_bytes for demand in demands)


def _rows_at(demand: Demand, price: float) -> int:
    """Return how many rows gain at least ``price`` a byte: gains fall with rows, so binary search finds the last."""
    low, high = 1, demand.num_ids
    while low < high:
        middle = (low + high) // 2
        if demand.gain(middle) >= price:
            low = middle + 1
        else:
            high = middle
    return low


def _spend_rest(demands: Sequence[Demand], rows: dict[str, int], budget_bytes: int) -> dict[str, int]:
    """Give single rows, best first, until no table can take one; the bisection leaves few."""
    rows = dict(rows)
    left = budget_bytes - _bytes(demands, rows)
    by_name = {demand.name: demand for demand in demands}
    queue = [(-demand.gain(rows[demand.name]), demand.name) for demand in demands]
    heapq.heapify(queue)
    while queue:
        gain, name = heapq.heappop(queue)
        demand = by_name[name]
        if gain == 0.0 or demand.row_bytes > left:
            continue
        rows[name] += 1
        left -= demand.row_bytes
        heapq.heappush(queue, (-demand.gain(rows[name]), name))
    return rows
