"""``rankmesh status``: stations, replicas, weights and store of a running mesh."""

from __future__ import annotations

import sys

import typer

from cluster.cli.options import DEFAULT_NAME, JsonOption, NameOption, PortOption, UrlOption

app = typer.Typer()


@app.command()
def status(
    as_json: JsonOption = False, name: NameOption = DEFAULT_NAME, port: PortOption = None, url: UrlOption = None
) -> None:
    """Show every station of a running mesh: replicas, processes, state, weights, store."""
    from rich.console import Console

    from cluster.cli.client import Client
    from cluster.cli.locate import mesh_url
    from cluster.cli.status_view import status_table
    from services.ingress.directory import StatusBody

    base = mesh_url(name, port, url)
    with Client(base) as client:
        body = client.fetch(StatusBody, "/v1/status")
    if as_json:
        sys.stdout.write(body.model_dump_json() + "\n")
        return
    console = Console(highlight=False)
    console.print(status_table(body, base, console.width))
