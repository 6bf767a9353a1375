"""``rankmesh quantize``: decide which layers run in low precision on this device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import JsonOption, StoreOption

app = typer.Typer()


@app.command()
def quantize(
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0.0, max=0.1, help="Largest relative change of NE: 0.0002 is 0.02 %.")
    ] = 0.0002,
    store: StoreOption = None,
    plans: Annotated[
        Path | None,
        typer.Option("--plans", help="Folder for the plan; default var/plans.", show_default=False, file_okay=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time each layer in each number format on this device, measure what it loses, and write the plan that pays."""
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.quantize import quantize_version

    settings = load_settings()
    var = settings.var_dir.absolute()
    weights = WeightStore(store or str(var / "weights"))
    console = Console(highlight=False, stderr=as_json)
    plan = quantize_version(
        weights,
        version or weights.latest(),
        settings.data_dir,
        plans or var / "plans",
        budget,
        console,
        Console(highlight=False, stderr=True),
    )
    if as_json:
        sys.stdout.write(plan.model_dump_json() + "\n")
