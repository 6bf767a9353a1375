"""The ``rankmesh`` command: one module a verb or two, each importing what it needs only when it runs."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from cluster.cli import (
    bench,
    chaos,
    delta,
    events,
    frontier,
    lifecycle,
    plan,
    publish,
    quantize,
    rank,
    recalibrate,
    rollout,
    run,
    simplify,
    status,
    tables,
    train,
    tune,
    weights,
)
from cluster.cli.group import VerbGroup


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rankmesh {installed_version('rankmesh')}")
        raise typer.Exit


app = typer.Typer(
    name="rankmesh",
    cls=VerbGroup,
    help="A ranking mesh on Ray Serve: start it, ask it, watch it, train it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that belong to no verb."""


for module in (
    run,
    lifecycle,
    status,
    rank,
    train,
    weights,
    publish,
    delta,
    recalibrate,
    rollout,
    simplify,
    tables,
    quantize,
    tune,
    frontier,
    plan,
    bench,
):
    app.registered_commands += module.app.registered_commands
app.add_typer(events.app, name="events")
app.add_typer(chaos.app, name="chaos")

__all__ = ["app"]
