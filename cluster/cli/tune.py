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

    settings = load_settings()
    mesh = load_mesh(config or DEFAULT_PATH)
    store = WeightStore(weights_url(mesh, settings.var_dir))
    result = tune_version(store.open(version or store.latest()), mesh, settings.var_dir)
    if as_json:
        sys.stdout.write(orjson.dumps(dataclasses.asdict(result)).decode() + "\n")
        return
    console = Console(highlight=False)
    for outcome in result.outcomes:
        time = "" if outcome.time_us is None else f"{outcome.time_us / 1e3:8.2f} ms"
        error = "" if outcome.error is None else f"error {outcome.error:.1e}"
        console.print(f"{outcome.variant.replace('_', ' '):18} {outcome.fate:12} {time:12} {error:14} {outcome.detail}")


def tune_version(weights: WeightSource, mesh: MeshConfig, var_dir: Path) -> SearchResult:
    """Search, with as many threads as a ranking replica has, or read what an earlier search found.

    Args:
        weights: The version.
        mesh: Says which precision is allowed, and how many threads a replica has.
        var_dir: Folder of run-time files.
    """
    import torch

    from models.config import RankerConfig
    from models.stations import load_network
    from models.tuning import tune as search_execution

    threads = [part.replicas.threads for part in mesh.ranking.values() if part.replicas.threads is not None]
    before = torch.get_num_threads()
    torch.set_num_threads(max(threads, default=before))
    try:
        network = load_network(weights, RankerConfig.model_validate(weights.json("model")))
        return search_execution(network, mesh.execution.precision, var_dir.absolute() / "search")
    finally:
        torch.set_num_threads(before)
