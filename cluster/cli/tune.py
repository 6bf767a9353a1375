"""``rankmesh tune``: search the fastest execution of published weights on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from cluster.config import MeshConfig
    from kernels.search import SearchResult
    from models.source import WeightSource

app = typer.Typer()


@app.command()
def tune(
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every way to execute the network against its modules, time those that are right, and keep the fastest."""
    import dataclasses

    import orjson
    from rich.console import Console

    from cluster.config import DEFAULT_PATH, load_mesh
    from cluster.weights import weights_url
    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.evaluate import check_release

    settings = load_settings()
    mesh = load_mesh(config or DEFAULT_PATH)
    store = WeightStore(weights_url(mesh, settings.var_dir))
    weights = store.open(version or store.latest())
    check_release(weights)
    # On a terminal a line that moves; in a pipe nothing, as nothing is known before the end.
    with Console(stderr=True).status("checking each way to run the network, timing those that are right"):
        result = tune_version(weights, mesh, settings.var_dir)
    if as_json:
        sys.stdout.write(orjson.dumps(dataclasses.asdict(result)).decode() + "\n")
        return
    console = Console(highlight=False)
    if result.cached:
        console.print("found by an earlier search of this model on this machine", style="dim")
    for outcome in result.outcomes:
        time = "" if outcome.time_us is None else f"{outcome.time_us / 1e3:8.2f} ms"
        error = "" if outcome.error is None else f"error {outcome.error:.1e}"
        name = outcome.variant.replace("_", " ")
        line = f"{name:16} {outcome.fate:11} {time:11} {error:13} {outcome.detail}"
        console.print(line.rstrip(), soft_wrap=True)
    if mesh.execution.backend != "auto":
        console.print(
            f"replicas run {mesh.execution.backend}, as execution.backend says: only auto takes what a search found",
            style="dim",
        )


def tune_version(weights: WeightSource, mesh: MeshConfig, var_dir: Path) -> SearchResult:
    """Search with the threads of each station that runs the network, or read what an earlier search found.

    Returns:
        What was found with the first ranking tier's threads.

    Args:
        weights: The version.
        mesh: Says which precision is allowed, and how many threads a replica has.
        var_dir: Folder of run-time files.
    """
    import torch

    from models.config import RankerConfig
    from models.stations import load_network
    from models.tuning import tune as search_execution

    before = torch.get_num_threads()
    parts = [part.replicas for part in mesh.ranking.values()] + [mesh.sequence.replicas]
    if mesh.foundation is not None:
        parts.append(mesh.foundation.replicas)
    network = load_network(weights, RankerConfig.model_validate(weights.json("model")))
    found = []
    try:
        for threads in dict.fromkeys(part.threads or before for part in parts):
            torch.set_num_threads(threads)
            found.append(search_execution(network, mesh.execution.precision, var_dir.absolute() / "search"))
        return found[0]
    finally:
        torch.set_num_threads(before)
