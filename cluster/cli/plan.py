"""``rankmesh plan``: where the tables of a cluster would lie, what that costs, and the arithmetic behind it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from models.embedding.planner.report import Report
    from models.embedding.planner.search import Plan

app = typer.Typer()

DEFAULT_PLAN = Path(__file__).parents[2] / "configs" / "plan" / "local.yaml"
_BAR_CELLS = 12
_CARDS_SHOWN = 32


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(help="Cluster and tables (YAML); default configs/plan/local.yaml.", exists=True, dir_okay=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine first and plan with its figures.")
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the plan into this file.", dir_okay=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Place tables on cards: table-wise, row-wise, column-wise or replicated; exit status 1 when it falls short.

    Shows resident bytes, bytes a request, the hottest card, the load time, and how each figure comes about.
    """
    import orjson
    from rich.console import Console

    from models.embedding.planner import PlanConfig, make_plan
    from models.embedding.planner.picture import draw
    from models.embedding.planner.report import make_report
    from shared.config import load_config

    config = load_config(PlanConfig, file or DEFAULT_PLAN)
    if measure:
        from models.embedding.planner.calibrate import calibrate
        from shared.clock import SystemClock

        config = config.model_copy(update={"card": calibrate(config.card, SystemClock())})
    made = make_plan(config)
    report = make_report(made)
    if svg is not None:
        svg.write_text(draw(made, report), encoding="utf-8")
    if as_json:
        sys.stdout.write(orjson.dumps(_document(made, report)).decode() + "\n")
    else:
        console = Console(highlight=False)
        for part in (_tables(report), _cards(made, report), *report.arithmetic):
            console.print(part)
        console.print("; ".join(report.problems) if report.problems else "feasible")
    sys.exit(1 if report.problems else 0)


def _tables(report: Report) -> RenderableType:
    from rich.table import Table

    from models.embedding.planner.config import size

    table = Table("table", "rows", "width", "bytes", "placement", "cards", "hot rows")
    for group in report.groups:
        one = group.table
        table.add_row(
            f"{group.name} x {group.num_tables}" if group.num_tables > 1 else group.name,
            f"{one.rows:,}" if one.rows < 10**6 else size(one.rows, "").replace("G", "bn"),
            f"{one.width} {one.row_type}",
            size(group.total_bytes),
            group.kind,
            str(len(group.cards)),
            f"{group.hot_rows:,}" if group.hot_rows else "",
        )
    return table


def _cards(made: Plan, report: Report) -> RenderableType:
    from rich.table import Table

    from cluster.cli.bars import share_bar
    from models.embedding.planner.config import size

    room, slowest = made.config.card.table_bytes, max(report.times_us)
    table = Table("card", "resident", f"of {size(room)}", "rows", "sent", "a request", "of the hottest")
    for card in range(min(made.config.num_cards, _CARDS_SHOWN)):
        table.add_row(
            str(card),
            size(report.resident_bytes[card]),
            share_bar(report.resident_bytes[card] / room, _BAR_CELLS, "cyan"),
            f"{report.lookups[card]:,.0f}",
            size(report.sent_bytes[card]),
            f"{report.times_us[card]:.1f} us",
            share_bar(report.times_us[card] / slowest, _BAR_CELLS, "magenta"),
        )
    if made.config.num_cards > _CARDS_SHOWN:
        table.add_row(f"and {made.config.num_cards - _CARDS_SHOWN} more", *[""] * 6)
    return table


def _document(made: Plan, report: Report) -> dict[str, object]:
    """Return the plan and its figures; ``settings`` are what the tables of a model configuration take."""
    return {
        "feasible": not report.problems,
        "problems": report.problems,
        "num_parameters": report.num_parameters,
        "resident_bytes": report.resident_bytes,
        "lookups": report.lookups,
        "sent_bytes": report.sent_bytes,
        "times_us": report.times_us,
        "load_s": report.load_s,
        "requests_s_max": report.requests_s_max,
        "hottest_ratio": report.hottest_ratio,
        "settings": [choice.settings() for choice in made.choices],
        "arithmetic": report.arithmetic,
        "card": made.config.card.model_dump(),
    }
