"""``rankmesh weights``: the published versions, how good they are and which ones are served."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.options import JsonOption, StoreOption

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from shared.weights import WeightStore

app = typer.Typer()


@app.command()
def weights(
    num: Annotated[int, typer.Option("--num", min=1, help="Newest versions to show.")] = 20,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List published weights, newest first: when made, of which run, how good, and which mesh serves them."""
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore

    var_dir = load_settings().var_dir.absolute()
    place = store or str(var_dir / "weights")
    documents = described(WeightStore(place), var_dir, num)
    if as_json:
        for document in documents:
            sys.stdout.write(json.dumps(document) + "\n")
        return
    console = Console(highlight=False)
    if not documents:
        console.print(f"no weights in {place} yet; `rankmesh train` makes some", soft_wrap=True)
        return
    console.print(_table(documents))


def described(store: WeightStore, var_dir: Path, num: int) -> list[dict[str, Any]]:
    """Return what there is to say of the newest versions, newest first.

    Args:
        store: Where they are.
        var_dir: Folder of run-time files, where the meshes of this machine say what they serve.
        num: How many at most.
    """
    from cluster.state import read_state
    from cluster.weights import Choice
    from shared.errors import WeightsError

    states = [state for path in sorted(var_dir.glob("*/mesh.json")) if (state := read_state(path)) is not None]
    found = []
    for version in reversed(store.versions()[-num:]):
        reader = store.open(version)
        try:
            metrics = reader.json("metrics")
        except WeightsError:  # published by something else than training
            metrics = {}
        quality = Choice(version, metrics, is_new=False).quality()
        derived = reader.manifest.derived
        found.append(
            {
                "version": version,
                "created": reader.manifest.created,
                "run": metrics.get("train", {}).get("name", ""),
                "made_of": None if derived is None else derived.model_dump(mode="json"),
                "click_auc": quality.get("auc"),
                "click_ne": quality.get("ne"),
                "served_by": [state.name for state in states if state.runs and state.version == version],
            }
        )
    return found


def _table(documents: list[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bright_black")
    table.add_column("version", no_wrap=True)
    table.add_column("made (UTC)", no_wrap=True)
    table.add_column("run", overflow="fold")
    for name in ("AUC", "NE"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("served by", overflow="fold", style="green")
    for one in documents:
        run = one["run"] if one["made_of"] is None else f"{one['run']}, changed"
        figures = ["-" if one[name] is None else f"{one[name]:.3f}" for name in ("click_auc", "click_ne")]
        made = one["created"][:16].replace("T", " ")
        table.add_row(one["version"], made, run, *figures, ", ".join(one["served_by"]))
    return table
