"""``rankmesh tables``: store the rows of published weights in fewer bytes."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from cluster.cli.options import JsonOption, StoreOption

app = typer.Typer()


class Rows(StrEnum):
    """How shards keep rows."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


@app.command()
def tables(
    rows: Annotated[Rows, typer.Option("--rows", help="How the shards keep rows.")],
    hot: Annotated[
        int, typer.Option("--hot", min=0, help="Rows of each row-wise table that every shard holds, the most read.")
    ] = 0,
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store the rows of published weights in fewer bytes, measure what it costs, publish the result."""
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.tables import store_tables

    settings = load_settings()
    weights = WeightStore(store or str(settings.var_dir.absolute() / "weights"))
    console = Console(highlight=False, stderr=as_json)
    made, report = store_tables(weights, version or weights.latest(), settings.data_dir, rows.value, hot, console)
    if as_json:
        sys.stdout.write(json.dumps({"version": made, **report.document()}) + "\n")
