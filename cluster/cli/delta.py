"""``rankmesh delta``: the in-place updates of a version; list them, make one of two versions, take some back."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import JsonOption, StoreOption

if TYPE_CHECKING:
    from shared.weights.deltas import Delta

app = typer.Typer()


@app.command()
def delta(
    base: Annotated[str, typer.Argument(help="Weights version whose deltas are meant.")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="Publish the step to this version's tensors as the next delta.", show_default=False),
    ] = None,
    back_to: Annotated[
        int | None,
        typer.Option(
            "--back-to",
            min=0,
            help="Publish the step back to the state after this delta, 0 as published, as the next delta.",
            show_default=False,
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the deltas of a version, or publish the next one: to another version's state, or back to an earlier one.

    Only rows and tensors whose bits changed are in a delta. Versions of another form (more rows, other layers) cannot
    be reached by deltas.
    """
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from shared.weights.delta_log import DeltaLog

    if to is not None and back_to is not None:
        raise usage_error("give --to or --back-to, not both", "--to")
    weights = WeightStore(store or str(load_settings().var_dir.absolute() / "weights"))
    if to is not None:
        from training.deltas import publish_difference

        deltas = [publish_difference(weights, base, weights.open(to))]
    elif back_to is not None:
        from training.deltas import publish_inverse

        deltas = [publish_inverse(weights, base, back_to)]
    else:
        weights.open(base)  # a version that is not there is an error, not an empty list
        deltas = list(DeltaLog(weights, base).since(0))
    if as_json:
        for one in deltas:
            sys.stdout.write(json.dumps(_document(one)) + "\n")
    elif not deltas:
        Console(highlight=False).print(f"deltas of {base}: none so far")
    else:
        Console(highlight=False).print(_table(base, deltas))


def _document(delta: Delta) -> dict[str, object]:
    return {
        "stamp": delta.stamp,
        "created": delta.created,
        "rows": {key: len(part.ids) for key, part in delta.rows.items()},
        "whole": sorted(delta.whole),
        "documents": sorted(delta.documents),
        "bytes": len(delta.payload),
        "crc": f"{delta.crc:08x}",
        "previous": f"{delta.previous:08x}",
    }


def _table(base: str, deltas: list[Delta]) -> object:
    from rich.table import Table

    table = Table(title=f"deltas of {base}", title_justify="left")
    for name in ("state", "created"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "tensors", "bytes"):
        table.add_column(name, justify="right")
    for one in deltas:
        table.add_row(one.stamp, one.created, f"{one.num_rows:,}", str(len(one.whole)), f"{len(one.payload):,}")
    return table
