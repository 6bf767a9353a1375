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

BROKEN_SHOWN = 5
"""Versions that are damaged or were never completed, of which the list says why."""

REASON_CHARS_MAX = 400


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
    weight_store = WeightStore(place)
    documents, broken = described(weight_store, var_dir, num), weight_store.incomplete()
    errors = Console(stderr=True, highlight=False, markup=False)
    for reason in list(broken.values())[:BROKEN_SHOWN]:
        errors.print(f"left out: {reason[:REASON_CHARS_MAX]}", soft_wrap=True)
    if len(broken) > BROKEN_SHOWN:
        errors.print(f"left out: {len(broken) - BROKEN_SHOWN} more")
    if as_json:
        for document in documents:
            sys.stdout.write(json.dumps(document) + "\n")
        return
    console = Console(highlight=False)
    if not documents:
        words = "no complete weights in {}" if broken else "no weights in {} yet"
        console.print(f"{words.format(place)}; `rankmesh train` makes some", soft_wrap=True)
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
        try:
            quality, run = (
                Choice(version, metrics, is_new=False).quality(),
                str(metrics.get("train", {}).get("name", "")),
            )
            auc, ne = (None if quality.get(name) is None else float(quality[name]) for name in ("auc", "ne"))
        except (AttributeError, KeyError, TypeError, ValueError):  # metrics of another form than training writes
            run, auc, ne = "", None, None
        derived = reader.manifest.derived
        found.append(
            {
                "version": version,
                "created": reader.manifest.created,
                "run": run,
                "made_of": None if derived is None else derived.model_dump(mode="json"),
                "click_auc": auc,
                "click_ne": ne,
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
