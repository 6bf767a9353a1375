"""``rankmesh up`` and ``rankmesh down``: a mesh that stays when the command ends, and its end."""

from __future__ import annotations

import typer

from cluster.cli.options import (
    DEFAULT_NAME,
    ConfigOption,
    FreeNameOption,
    NameOption,
    NewPortOption,
    TrainConfigOption,
    WeightsOption,
)

app = typer.Typer()


@app.command()
def up(
    name: FreeNameOption = None,
    port: NewPortOption = None,
    config: ConfigOption = None,
    train: TrainConfigOption = None,
    weights: WeightsOption = None,
) -> None:
    """Start a mesh in the background: data, weights and histories first, where they are not there yet."""
    from rich.console import Console

    from cluster.cli.bring_up import Plan, bring_up
    from cluster.cli.demonstrate import direct
    from cluster.cli.interrupts import interrupted_once
    from cluster.cli.steps import Steps
    from shared.clock import SystemClock

    steps = Steps(Console(highlight=False), SystemClock())
    with interrupted_once():
        plan = Plan.of(name, port, config, train, weights)
        running = bring_up(plan, steps, detached=True)
    samples = running.catalogue.samples
    user_id = samples[0].user_id if samples else None
    mesh = running.mesh
    direct(steps.console, mesh.url, user_id, mesh.name, steps.elapsed_s, detached=True, http=plan.mesh.http)


@app.command()
def down(name: NameOption = DEFAULT_NAME) -> None:
    """End a mesh and prove that none of its processes and ports is left."""
    from rich.console import Console

    from cluster.cli.run import end
    from cluster.cli.steps import Steps
    from cluster.local import Mesh
    from shared.clock import SystemClock
    from shared.settings import load_settings

    steps = Steps(Console(highlight=False), SystemClock())
    var_dir = load_settings().var_dir
    mesh = Mesh.find(name, var_dir)
    if mesh is not None:
        end(mesh, steps)
    elif Mesh.end(name, var_dir):
        steps.note(f"mesh {name} was killed before; what it had left behind is gone")
    else:
        steps.note(f"no mesh called {name} runs here")
