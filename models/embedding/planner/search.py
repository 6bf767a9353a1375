"""The choice of placements: tables from the largest on, each where the sum of squared times of the cards grows least.

The square weighs both: work that a placement adds on all cards (a row-wise table costs every card a call of it), and a
card that gets more than its share. The busiest card alone would be a worse guide: as long as some card is the busiest,
filling up the others would look free or, spread over all, dear.

Every choice is one that ``models.embedding.plan.ShardPlan`` can carry out. Greedy, not optimal: the report says how far
the busiest card is from the mean, which no other distribution of the same work can beat by more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from models.config import Placement
from models.embedding.planner.config import PlanConfig, PlanTable, size
from models.embedding.planner.cost import Load, head_reads, loads, stored_row_bytes, table_bytes
from shared.errors import ConfigError

HOT_LOAD_MAX = 0.01
"""A row that adds more than this share to its card's rows of the table is worth a copy on every card."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where one table lies.

    Args:
        table: The table.
        kind: Its placement.
        owner: Card of a table-wise table.
        hot_rows: Rows of a row-wise table that all cards hold.
        loads: What it asks of each card.
    """

    table: PlanTable
    kind: Placement
    owner: int
    hot_rows: int
    loads: tuple[Load, ...]

    def settings(self) -> dict[str, str | int]:
        """Return the placement as a ``models.config.TableConfig`` takes it."""
        found: dict[str, str | int] = {
            "name": self.table.name,
            "placement": self.kind,
            "row_type": self.table.row_type,
        }
        if self.kind == "table_wise":
            found["shard"] = self.owner
        if self.hot_rows:
            found["hot_rows"] = self.hot_rows
        return found


@dataclass
class Plan:
    """All tables placed.

    Args:
        config: What was asked.
        choices: One a table, in the order of the configuration.
    """

    config: PlanConfig
    choices: list[Choice] = field(default_factory=list)

    def resident_bytes(self) -> list[int]:
        """Return the bytes of tables on every card."""
        return [sum(choice.loads[card].resident_bytes for choice in self.choices) for card in self._cards()]

    def lookups(self) -> list[float]:
        """Return the rows that every card reads a request."""
        return [sum(choice.loads[card].lookups for choice in self.choices) for card in self._cards()]

    def sent_bytes(self) -> list[float]:
        """Return the bytes that travel between every card and the reader a request."""
        return [sum(choice.loads[card].sent_bytes for choice in self.choices) for card in self._cards()]

    def times_us(self) -> list[float]:
        """Return what a request costs every card, microseconds."""
        card = self.config.card
        times = [sum(choice.loads[index].time_us(card) for choice in self.choices) for index in self._cards()]
        return [time + card.call_us if time else 0.0 for time in times]

    def _cards(self) -> range:
        return range(self.config.num_cards)


def make_plan(config: PlanConfig) -> Plan:
    """Place all tables.

    Raises:
        ConfigError: the tables do not fit; names the table, or the bytes that are missing.
    """
    tables = config.single_tables()
    needed, there = sum(map(table_bytes, tables)), config.card.table_bytes * config.num_cards
    if needed > there:
        raise ConfigError(
            f"tables of {size(needed)} must fit into the {size(there)} that {config.num_cards} cards have",
            field="num_cards",
            limit=there,
            value=needed,
        )
    state = _State(config)
    order = sorted(tables, key=lambda table: (-table_bytes(table), table.name))
    chosen = {table.name: state.place(table) for table in order}
    return Plan(config, [chosen[table.name] for table in tables])


class _State:
    """Cards as they fill."""

    def __init__(self, config: PlanConfig) -> None:
        self._config = config
        self._bytes = [0] * config.num_cards
        self._times = [0.0] * config.num_cards
        self._copies = 0
        self._copies_max = int(config.card.table_bytes * config.replicate_share)

    def place(self, table: PlanTable) -> Choice:
        """Take the placement that adds least to the sum of squares; then the one of fewest bytes."""
        card = self._config.card
        best: tuple[tuple[float, int], Choice, int] | None = None
        for choice, copies in self._options(table):
            if not self._fits(choice, copies):
                continue
            times = [load.time_us(card) for load in choice.loads]
            squares = sum((before + more) ** 2 for before, more in zip(self._times, times, strict=True))
            key = (squares, sum(load.resident_bytes for load in choice.loads))
            if best is None or key < best[0]:
                best = (key, choice, copies)
        if best is None:
            raise ConfigError(
                f"table {table.name} of {size(table_bytes(table))} fits nowhere: the cards have "
                f"{size(min(self._bytes))} to {size(max(self._bytes))} of {size(card.table_bytes)} filled",
                field=f"tables.{table.name}",
                limit=card.table_bytes,
                value=table_bytes(table),
            )
        _, choice, copies = best
        self._copies += copies
        for index, load in enumerate(choice.loads):
            self._bytes[index] += load.resident_bytes
            self._times[index] += load.time_us(card)
        return choice

    def _options(self, table: PlanTable) -> list[tuple[Choice, int]]:
        """Return the placements that are open to a table, with the bytes of copies that each card would hold."""
        cards = self._config.num_cards
        # Of the cards that could own it only the least busy with room is worth trying.
        room = [
            card for card in range(cards) if self._bytes[card] + table_bytes(table) <= self._config.card.table_bytes
        ]
        owner = min(room, key=lambda card: (self._times[card], self._bytes[card], card), default=0)
        hot = self._hot_rows(table)
        kinds: dict[Placement, tuple[int, int, int]] = {  # owner, hot rows, bytes of copies
            "table_wise": (owner, 0, 0),
            "row_wise": (0, hot, hot * stored_row_bytes(table)),
            "column_wise": (0, 0, 0),
            "replicated": (0, 0, table_bytes(table) if cards > 1 else 0),
        }
        return [
            (Choice(table, kind, at, rows, tuple(loads(table, kind, cards, at, rows))), copies)
            for kind, (at, rows, copies) in kinds.items()
            if table.placement in (None, kind)
        ]

    def _hot_rows(self, table: PlanTable) -> int:
        """Return how many top ranks are read so often that they would tilt their card, within the room for copies."""
        if self._config.num_cards == 1:
            return 0
        limit = HOT_LOAD_MAX * table.ids / self._config.num_cards
        hot = sum(1 for reads in head_reads(table.ids, table.rows, table.zipf) if reads > limit)
        return min(hot, max(self._copies_max - self._copies, 0) // stored_row_bytes(table))

    def _fits(self, choice: Choice, copies: int) -> bool:
        # A placement that the file demands may copy as much as it needs.
        if copies and choice.table.placement is None and self._copies + copies > self._copies_max:
            return False
        room = self._config.card.table_bytes
        return all(held + load.resident_bytes <= room for held, load in zip(self._bytes, choice.loads, strict=True))
