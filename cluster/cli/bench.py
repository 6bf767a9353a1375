"""``rankmesh bench`` and ``rankmesh verify``: forwarded to the benchmarks package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.options import DEFAULT_NAME, ConfigOption, JsonOption, NameOption, PortOption, UrlOption

app = typer.Typer()

SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]


def _benchmarks(module: str) -> Any:
    # By name: benchmarks sit above this package in the import order, and only these two verbs reach up.
    return import_module(f"benchmarks.{module}")


def _named(name: str, port: int | None, url: str | None) -> str | None:
    """Return the URL of the mesh that a port or a URL names; None where neither does."""
    if port is None:
        return url
    from cluster.cli.locate import mesh_url

    return mesh_url(name, port, url)


@app.command()
def bench(
    benchmark: Annotated[
        str | None, typer.Argument(help="Name of one; without it, list them.", show_default=False)
    ] = None,
    seed: SeedOption = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples; rows go to var/bench/.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    name: NameOption = DEFAULT_NAME,
    port: PortOption = None,
    url: UrlOption = None,
) -> None:
    """Run one benchmark, show its figures and append them to benchmarks/results/."""
    url = _named(name, port, url)
    options = _benchmarks("registry").BenchmarkOptions(seed=seed, quick=quick, url=url, name=name, config=config)
    sys.exit(_benchmarks("cli").bench(benchmark, options, json_lines=as_json))


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(help="Result file (JSON lines).", exists=True, dir_okay=False)],
    right: Annotated[Path, typer.Argument(help="Another.", exists=True, dir_okay=False)],
    as_json: JsonOption = False,
) -> None:
    """Show the figures of two result files side by side."""
    sys.exit(_benchmarks("cli").compare(left, right, json_lines=as_json))


@app.command()
def verify(
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests without speculative embeddings.")
    ] = 300,
    num_speculative: Annotated[
        int, typer.Option("--speculative", min=0, help="Users with them, two requests each.")
    ] = 48,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    name: NameOption = DEFAULT_NAME,
    port: PortOption = None,
    url: UrlOption = None,
) -> None:
    """Compare a mesh with the oracle: equal scores, equal order; exit status 1 when an answer is wrong.

    A mesh of that name that runs is asked; without one, one is brought up and ended.
    """
    url = _named(name, port, url)
    options = _benchmarks("cli").VerifyOptions(
        url=url, name=name, config=config, num_requests=num_requests, num_speculative=num_speculative, seed=seed
    )
    sys.exit(_benchmarks("cli").verify(options, json_lines=as_json))
