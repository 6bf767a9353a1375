"""The figures of a plan, each with the arithmetic that gives it, so that a person can redo it."""

from __future__ import annotations

from dataclasses import dataclass

from models.embedding.planner.config import GB, PlanTable, size
from models.embedding.planner.cost import table_bytes
from models.embedding.planner.search import Choice, Plan


@dataclass(frozen=True, slots=True)
class Group:
    """Tables that are alike and lie alike.

    Args:
        name: Their common name.
        table: One of them.
        kind: Placement.
        num_tables: How many.
        hot_rows: Rows that all cards hold, the most of one of them.
        total_bytes: Bytes of all of them, copies not counted.
        cards: Cards that hold some of it.
    """

    name: str
    table: PlanTable
    kind: str
    num_tables: int
    hot_rows: int
    total_bytes: int
    cards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan gives.

    Args:
        num_parameters: Values in all tables.
        resident_bytes: Bytes of tables by card.
        lookups: Rows read a request by card.
        sent_bytes: Bytes that travel a request by card.
        times_us: Cost of a request by card, microseconds.
        load_s: Until the last card has its weights.
        requests_s_max: Requests a second at which the busiest card is never idle.
        hottest_ratio: Its cost over the mean.
        groups: The tables.
        problems: What the cluster was asked for and cannot do; empty: the plan is feasible.
        arithmetic: Lines for a person.
    """

    num_parameters: int
    resident_bytes: tuple[int, ...]
    lookups: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    times_us: tuple[float, ...]
    load_s: float
    requests_s_max: float
    hottest_ratio: float
    groups: tuple[Group, ...]
    problems: tuple[str, ...]
    arithmetic: tuple[str, ...]


def make_report(plan: Plan) -> Report:
    """Work out the figures of a plan."""
    config = plan.config
    resident, times = plan.resident_bytes(), plan.times_us()
    mean_us = sum(times) / len(times)
    load_s = max(_card_load_s(plan), _store_load_s(plan))
    rate_max = 1e6 / max(times)
    problems = []
    if (needed := max(resident) + config.dense_gb * GB) > config.card.memory_gb * GB:
        problems.append(
            f"tables and dense weights of the fullest card take {size(needed)}, more than its memory_gb "
            f"{config.card.memory_gb:g}"
        )
    if load_s > config.load_s_max:
        problems.append(f"loading takes {load_s:.0f} s, more than load_s_max {config.load_s_max:g}")
    if rate_max < config.requests_s:
        problems.append(f"the busiest card answers {rate_max:,.0f} requests/s, fewer than {config.requests_s:,g}")
    return Report(
        num_parameters=sum(choice.table.rows * choice.table.width for choice in plan.choices),
        resident_bytes=tuple(resident),
        lookups=tuple(plan.lookups()),
        sent_bytes=tuple(plan.sent_bytes()),
        times_us=tuple(times),
        load_s=load_s,
        requests_s_max=rate_max,
        hottest_ratio=max(times) / mean_us,
        groups=tuple(_groups(plan.choices)),
        problems=tuple(problems),
        arithmetic=tuple(_arithmetic(plan)),
    )


def _card_load_s(plan: Plan) -> float:
    fullest = max(plan.resident_bytes()) + plan.config.dense_gb * GB
    return fullest / (plan.config.card.load_gb_s * GB)


def _store_load_s(plan: Plan) -> float:
    once = sum(table_bytes(choice.table) for choice in plan.choices) + plan.config.dense_gb * GB
    return once / (plan.config.origin_gb_s * GB)


def _groups(choices: list[Choice]) -> list[Group]:
    found: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        base, _, index = choice.table.name.rpartition(".")
        name = base if base and index.isdigit() else choice.table.name
        found.setdefault((name, choice.kind), []).append(choice)
    return [
        Group(
            name=name,
            table=members[0].table,
            kind=kind,
            num_tables=len(members),
            hot_rows=max(member.hot_rows for member in members),
            total_bytes=sum(table_bytes(member.table) for member in members),
            cards=tuple(sorted({card for member in members for card, load in enumerate(member.loads) if load.lookups})),
        )
        for (name, kind), members in found.items()
    ]


def _arithmetic(plan: Plan) -> list[str]:
    config, card = plan.config, plan.config.card
    resident, times, sent, lookups = plan.resident_bytes(), plan.times_us(), plan.sent_bytes(), plan.lookups()
    total = sum(table_bytes(choice.table) for choice in plan.choices)
    fullest, hottest = max(resident), times.index(max(times))
    tables = sum(1 for choice in plan.choices if choice.loads[hottest].resident_bytes)
    read = sum(choice.loads[hottest].read_bytes for choice in plan.choices)
    parameters = sum(choice.table.rows * choice.table.width for choice in plan.choices)
    mean_us = sum(times) / len(times)
    once = total + config.dense_gb * GB
    return [
        f"parameters: rows x width over {len(plan.choices)} tables = {parameters:.4g} in {size(total)}",
        f"room: {config.num_cards} cards x {card.memory_gb:g} GB x {card.table_share:.0%} = "
        f"{size(config.num_cards * card.table_bytes)}",
        f"resident: {size(sum(resident))} with copies; fullest card {size(fullest)}, "
        f"{fullest / card.table_bytes:.0%} of its {size(card.table_bytes)}; "
        f"fullest / mean = {fullest * config.num_cards / sum(resident):.3f}",
        f"bytes a request: {sum(lookups):,.0f} rows, each id 8 B there and 4 B x width back = {size(sum(sent))}",
        f"hottest card {hottest}: {card.call_us:g} us a call + {tables} tables x {card.table_us:g} us + "
        f"{lookups[hottest]:,.0f} rows x {card.lookup_us:g} us + {size(read)} read / {card.read_gb_s:g} GB/s + "
        f"{size(sent[hottest])} sent / {card.link_gb_s:g} GB/s = {times[hottest]:.1f} us",
        f"hottest / mean: {times[hottest]:.1f} / {mean_us:.1f} us = {times[hottest] / mean_us:.3f}",
        f"rate: 1e6 / {times[hottest]:.1f} us = {1e6 / times[hottest]:,.0f} requests/s; asked are "
        f"{config.requests_s:,g}, {config.requests_s * times[hottest] / 1e6:.0%} of the hottest card",
        f"load, card: ({size(fullest)} + {config.dense_gb:g} GB dense) / {card.load_gb_s:g} GB/s = "
        f"{_card_load_s(plan):.1f} s",
        f"load, store: {size(once)}, each byte once / {config.origin_gb_s:g} GB/s = {_store_load_s(plan):.1f} s",
    ]
