"""``rankmesh chaos``: forwarded to the chaos lab of the benchmarks package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from cluster.cli.group import usage_error
from cluster.cli.options import JsonOption

SCENARIOS = Path("configs/chaos")


def scenario_path(given: str) -> Path:
    """Return the file of a scenario: a path, or the name of one of those there are.

    Raises:
        typer.BadParameter: there is none; names those there are.
    """
    path = Path(given)
    named = SCENARIOS / f"{given}.yaml"
    found = next((each for each in (path, named) if each.is_file()), None)
    if found is None:
        names = ", ".join(sorted(each.stem for each in SCENARIOS.glob("*.yaml")))
        raise usage_error(f"{given} is no file, nor one of {names or f'{SCENARIOS}/*.yaml'}", "scenario")
    return found


ScenarioArgument: TypeAlias = Annotated[
    Path, typer.Argument(help="Scenario: a file, or the name of one in configs/chaos.", parser=scenario_path)
]

app = typer.Typer(help="Break a mesh of its own on purpose, and judge every answer meanwhile.", no_args_is_help=True)


@app.callback()
def chaos() -> None:
    """Break a mesh of its own on purpose, and judge every answer meanwhile."""


@app.command()
def run(
    scenario: ScenarioArgument,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the schedule: the same seed, the same faults.")] = 0,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="Length of the load; faults come again and again.")
    ] = None,
    per_s: Annotated[float | None, typer.Option("--per-s", min=0.1, help="Requests a second.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a mesh, send requests at a steady rate, break parts of it, compare every answer with the oracle.

    Exit status 1 when an answer was wrong, or was lost or an error where that is not allowed, or the mesh did not
    become whole again. The report goes to var/chaos/ too, with a picture of every answer over time.
    """
    # By name: the lab sits above this package in the import order.
    lab = import_module("benchmarks.chaos.cli")
    sys.exit(lab.run(scenario, seed, duration_s=seconds, requests_per_s=per_s, json_lines=as_json))


@app.command()
def rate(
    scenario: ScenarioArgument,
    per_s: Annotated[
        list[float] | None, typer.Option("--per-s", min=0.1, help="Requests a second; may be given again.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="At each rate.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Show how many requests a second the mesh of a scenario bears on this machine while nothing is broken."""
    lab = import_module("benchmarks.chaos.cli")
    lab.rates(scenario, per_s or [5.0, 10.0, 20.0, 30.0], seconds, json_lines=as_json)
