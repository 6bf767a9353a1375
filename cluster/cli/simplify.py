"""``rankmesh simplify``: make published weights smaller."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cluster.cli.options import JsonOption, StoreOption

app = typer.Typer()


@app.command()
def simplify(
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            min=0.0,
            max=0.5,
            help="Largest relative contribution of a unit that is removed; 0: only what contributes nothing.",
        ),
    ] = 0.0,
    multiple: Annotated[
        int, typer.Option("--multiple", min=1, max=256, help="Hidden widths stay multiples of this, for vector units.")
    ] = 8,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove units of published weights that contribute nothing, measure what it costs, publish the smaller model."""
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.simplify import simplify_version

    settings = load_settings()
    weights = WeightStore(store or str(settings.var_dir.absolute() / "weights"))
    console = Console(highlight=False, stderr=as_json)
    progress = Console(highlight=False, stderr=True)
    made, report = simplify_version(
        weights, version or weights.latest(), settings.data_dir, threshold, console, multiple, progress
    )
    if as_json:
        sys.stdout.write(json.dumps({"version": made, **report.document()}) + "\n")
