"""``rankmesh rollout`` and ``rankmesh rollback``: another weights version in a running mesh, and back."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import DEFAULT_NAME, JsonOption, NameOption

if TYPE_CHECKING:
    from cluster.cli.client import Client
    from cluster.desk import RolloutRequest
    from services.ingress.directory import RolloutBody

app = typer.Typer()

_PERIOD_S = 0.5
_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)")

WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for the end; status 1 when it is not the wished one.")
]


@app.command()
def rollout(
    version: Annotated[str, typer.Argument(help="Weights version of the mesh's store; `latest` for the newest.")],
    canary: Annotated[
        str, typer.Option("--canary", help="Share of the users that get it first, such as 5% or 0.05; 0: all at once.")
    ] = "5%",
    watch: Annotated[
        float, typer.Option("--watch", min=0, help="Seconds for which the canary is watched before all get it.")
    ] = 60.0,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    name: NameOption = DEFAULT_NAME,
) -> None:
    """Roll a version out over a running mesh, without a stop, and take it back by itself when something is wrong.

    Every replica reads the version beside the one that serves and must give its golden answers. Then a share of the
    users gets it; failed or degraded answers, or a worse normalized entropy or calibration on labelled events, take it
    back. The old version serves all the time and stays ready for `rankmesh rollback`.
    """
    share = _share(canary)
    _ask(_mesh(name), "rollout", "served", wait, as_json, version=version, share=share, watch_s=watch)


@app.command()
def rollback(wait: WaitOption = True, as_json: JsonOption = False, name: NameOption = DEFAULT_NAME) -> None:
    """Take a canary back, or return to the version that served before the last roll-out.

    Deltas of a version are taken back with `rankmesh delta VERSION --back-to NUMBER`.
    """
    _ask(_mesh(name), "rollback", "rolled_back", wait, as_json)


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise usage_error(f"must be a share below 100%, such as 5% or 0.05, is {text}", "--canary")
    return share


def _mesh(name: str) -> tuple[str, str]:
    """Return folder and URL of a running mesh of this machine."""
    from cluster.cli.locate import running_mesh_url
    from shared.settings import load_settings

    return str(load_settings().var_dir.absolute() / name), running_mesh_url(name)


def _ask(mesh: tuple[str, str], action: str, wished: str, wait: bool, as_json: bool, **fields: str | float) -> None:
    from pathlib import Path
    from secrets import token_hex

    from cluster.cli.client import Client
    from cluster.desk import RolloutRequest

    folder, url = mesh
    request = RolloutRequest.model_validate({"id": token_hex(4), "action": action, **fields})
    request.write(Path(folder))
    if not wait:
        return
    with Client(url) as client:
        found = _follow(client, request, quiet=as_json)
    if as_json:
        sys.stdout.write(found.model_dump_json() + "\n")
    if found.phase != wished:
        raise typer.Exit(1)


def _follow(client: Client, request: RolloutRequest, *, quiet: bool) -> RolloutBody:
    """Show each change of the roll-out until it has ended, by itself or by what somebody else asked for meanwhile."""
    from rich.console import Console

    from cluster.cli.status_view import rollout_text
    from services.ingress.directory import StatusBody
    from shared.clock import SystemClock

    console, clock, shown = Console(highlight=False, stderr=quiet), SystemClock(), ""
    while True:
        found = client.fetch(StatusBody, "/v1/status").rollout
        if found.id == request.id:
            text = rollout_text(found)
            if text.plain != shown:
                console.print(text)
                shown = text.plain
            if found.phase not in ("loading", "canary"):
                return found
        elif shown and found.phase in ("served", "rolled_back"):  # another request has ended it
            console.print(rollout_text(found))
            return found
        clock.block_s(_PERIOD_S)
