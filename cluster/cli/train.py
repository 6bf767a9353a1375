"""``rankmesh train`` and ``rankmesh evaluate``: make weights, and measure them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import JsonOption, StoreOption, TrainConfigOption

app = typer.Typer()


@app.command()
def train(
    config: TrainConfigOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="The larger model, configs/train/full.yaml: takes longer.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Train a model in time order, measure it on the held-out period and publish it to the weight store."""
    from rich.console import Console

    from cluster.weights import FULL_CONFIG, QUICK_CONFIG, one_trainer
    from shared.settings import load_settings
    from training.config import load_train_config
    from training.loop import train_and_publish

    if full and config is not None:
        raise usage_error("give --full or --train, not both", "--full")
    settings = load_settings()
    path = config or (FULL_CONFIG if full else QUICK_CONFIG)
    console = Console(highlight=False)
    told = "another process trains with this configuration; waiting for its end"
    try:
        with one_trainer(settings.var_dir, load_train_config(path), lambda: console.print(told)):
            train_and_publish(path, settings.data_dir, _store_url(store), console)
    except KeyboardInterrupt:
        console.print("stopped, nothing published")
        raise


@app.command()
def evaluate(
    version: Annotated[
        str | None, typer.Option("--version", help="Weights version; default the newest.", show_default=False)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure published weights on the held-out period: AUC, logloss, NE, calibration, gAUC by tier and objective.

    Takes about a minute with the weights of `rankmesh run` on two cores; standard error says how far it is.
    """
    from rich.console import Console

    from shared.settings import load_settings
    from shared.weights import WeightStore
    from training.evaluate import evaluate_version

    weights = WeightStore(_store_url(store))
    reader = weights.open(version or weights.latest())
    table, progress = Console(highlight=False, stderr=as_json), Console(highlight=False, stderr=True)
    evaluations = evaluate_version(reader, load_settings().data_dir, table, progress)
    if as_json:
        for evaluation in evaluations:
            sys.stdout.write(evaluation.model_dump_json() + "\n")


def _store_url(store: str | None) -> str:
    from shared.settings import load_settings

    return store or str(load_settings().var_dir.absolute() / "weights")
