"""``rankmesh frontier``: what routing requests to tiers gives, quality against cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import JsonOption, StoreOption

app = typer.Typer()


@app.command()
def frontier(
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option("--chart", help="Where to draw it, as SVG; default var/frontier.svg.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Route held-out requests at every price and show quality against cost, beside each tier alone."""
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.frontier import frontier_chart, frontier_of_version, show_frontier

    settings = load_settings()
    var = settings.var_dir.absolute()
    weights = WeightStore(store or str(var / "weights"))
    wanted = version or weights.latest()
    found = frontier_of_version(weights.open(wanted), settings.data_dir)
    path = chart or var / "frontier.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(frontier_chart(found, f"weights {wanted}: click NE on the test rows"), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps({"version": wanted, "chart": str(path), **found.document()}) + "\n")
        return
    console = Console(highlight=False)
    show_frontier(found, wanted, console)
    console.print(f"drawn in {path}", soft_wrap=True)
