"""``rankmesh publish``: bring a version from another store into this one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import JsonOption, StoreOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from shared.weights import LoadProgress

app = typer.Typer()


@app.command()
def publish(
    source: Annotated[str, typer.Argument(help="Weight store to take from, a folder or URL.")],
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest there.", show_default=False)
    ] = None,
    streams: Annotated[int, typer.Option("--streams", min=1, max=256, help="Chunks that are read at once.")] = 8,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy published weights from another store, every chunk checked, and list them only when all are right.

    A copy that was interrupted goes on where it stopped.
    """
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shared.settings import load_settings
    from shared.weights import LoadConfig, WeightStore
    from shared.weights.transfer import copy_version

    origin = WeightStore(source)
    target = WeightStore(store or str(load_settings().var_dir.absolute() / "weights"))
    wanted = version or origin.latest()
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        last: list[LoadProgress] = []
        asyncio.run(copy_version(origin, wanted, target, LoadConfig(streams=streams), _follow(bars, last)))
    num_bytes = sum(entry.bytes for entry in target.open(wanted).manifest.entries())
    read = last[-1].bytes_total - last[-1].bytes_found if last else 0
    if as_json:
        sys.stdout.write(json.dumps({"version": wanted, "bytes": num_bytes, "bytes_read": read}) + "\n")
    else:
        Console(highlight=False).print(f"published weights [bold]{wanted}[/bold]: {num_bytes:,} bytes, {read:,} read")


def _follow(bars: Progress, last: list[LoadProgress]) -> Callable[[LoadProgress], None]:
    """Return what shows the progress of a load and keeps its last state."""
    task = bars.add_task("weights")

    def show(state: LoadProgress) -> None:
        last[:] = [state]
        newest = state.files_done[-1] if state.files_done else ""
        bars.update(task, description=newest, total=state.bytes_total, completed=state.bytes_done)

    return show
