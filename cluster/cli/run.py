"""``rankmesh run``: bring a mesh up, rank held-out real requests, show an answer, keep serving."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import ConfigOption, FreeNameOption, NewPortOption, TrainConfigOption, WeightsOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.cli.bring_up import Plan
    from cluster.cli.steps import Steps
    from cluster.local import Mesh

app = typer.Typer()

_WATCH_PERIOD_S = 1.0


@app.command()
def run(
    name: FreeNameOption = None,
    port: NewPortOption = None,
    config: ConfigOption = None,
    train: TrainConfigOption = None,
    weights: WeightsOption = None,
    once: Annotated[bool, typer.Option("--once", help="End everything after the answer.")] = False,
) -> None:
    """Bring a mesh up, rank held-out real requests and show one, then serve until Ctrl-C.

    Data, weights and users' histories are fetched, trained and loaded once; later runs use them again.
    """
    from rich.console import Console

    from cluster.cli.bring_up import Plan
    from cluster.cli.interrupts import interrupted_once
    from cluster.cli.steps import Steps
    from shared.clock import SystemClock

    console = Console(highlight=False)
    steps = Steps(console, SystemClock())
    console.print("[bold]rankmesh[/bold]  six stations, one request", highlight=False)
    with interrupted_once():
        _run(steps, Plan.of(name, port, config, train, weights), once)


def _run(steps: Steps, plan: Plan, once: bool) -> None:
    from cluster.cli.bring_up import bring_up
    from cluster.cli.client import Client
    from cluster.cli.demonstrate import demonstrate, direct

    running = bring_up(plan, steps, detached=False)
    with ended(running.mesh, steps):
        with Client(running.mesh.url) as client:
            user_id = demonstrate(client, running.catalogue, steps)
        if once:
            return
        mesh = running.mesh
        direct(steps.console, mesh.url, user_id, mesh.name, steps.elapsed_s, http=plan.mesh.http)
        try:
            while not running.mesh.wait(_WATCH_PERIOD_S):
                pass
        except KeyboardInterrupt:
            return
        if running.mesh.was_ended:
            steps.note("the mesh was ended by `rankmesh down`, or a signal")
            return
        steps.note(f"the mesh has ended by itself; {running.mesh.folders.log} says why")
        raise typer.Exit(1)


@contextmanager
def ended(mesh: Mesh, steps: Steps) -> Iterator[None]:
    """End the mesh after the body, whatever became of it, and say what is gone."""
    try:
        yield
    finally:
        end(mesh, steps)


def end(mesh: Mesh, steps: Steps) -> None:
    """End a mesh as a step; the launcher proves that no process and no port is left, or raises.

    Raises:
        StageUnavailableError: something is left; names it.
    """
    with steps.step("end", "ending every process") as step:
        num_processes, num_ports = len(mesh.processes()), len(mesh.state.ports)
        mesh.stop()
        step.done(f"{num_processes} processes and {num_ports} ports of mesh {mesh.name} are gone")
