"""``rankmesh recalibrate``: calibration and router follow what users did with explored answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import DEFAULT_NAME, ConfigOption, JsonOption, NameOption

if TYPE_CHECKING:
    from cluster.config import MeshConfig
    from shared.userlog import StoreConfig
    from shared.weights import WeightStore
    from shared.weights.deltas import Delta
    from training.outcomes import JoinConfig, Outcomes
    from training.recalibration import RecalibrationConfig, Refit

app = typer.Typer()

_SECONDS_MAX = 90 * 86_400
"""Answers are kept so long, and no longer are their outcomes of use."""


@app.command()
def recalibrate(
    name: NameOption = DEFAULT_NAME,
    config: ConfigOption = None,
    delay: Annotated[
        float, typer.Option("--delay", min=0, max=_SECONDS_MAX, help="Seconds for which outcomes are waited for.")
    ] = 86_400,
    window: Annotated[
        float,
        typer.Option(
            "--window", min=1, max=_SECONDS_MAX, help="Seconds from the request on in which an event is its outcome."
        ),
    ] = 86_400,
    outcomes_min: Annotated[int, typer.Option("--outcomes-min", min=1, help="Fewer outcomes change nothing.")] = 500,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            min=1,
            max=_SECONDS_MAX,
            help="Do it again every so many seconds, until Ctrl-C.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, publish nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Refit calibration and router of a running mesh from the outcomes of its explored answers.

    A small share of requests is served by the best tier whatever it is worth, and its answers are kept with what every
    tier would have said. They are joined with what the users did next; scale and offset of every tier, and what its
    depth is worth, follow the outcomes, with a prior at what was published. The result is the next delta of the version
    that serves: the mesh takes it up by itself, and `rankmesh delta VERSION --back-to NUMBER` takes it back.
    """
    from cluster.cli.interrupts import interrupted_once
    from shared.clock import SystemClock
    from training.outcomes import JoinConfig
    from training.recalibration import RecalibrationConfig

    join = JoinConfig(delay_s=delay, window_s=window)
    limits = RecalibrationConfig(outcomes_min=outcomes_min)
    place = _place(name, config)
    clock = SystemClock()
    with interrupted_once():
        while True:
            try:
                _once(name, place, join, limits, dry_run, as_json, fails=every is None)
                if every is None:
                    return
                clock.block_s(every)
            except KeyboardInterrupt:
                return


def _place(name: str, path: Path | None) -> tuple[MeshConfig, StoreConfig, WeightStore]:
    """Return configuration, store and weights of a running mesh of this machine.

    Raises:
        StageUnavailableError: no such mesh runs here.
    """
    from cluster.cli.locate import running_mesh_url
    from cluster.config import DEFAULT_PATH, load_mesh
    from cluster.environment import MeshFolders
    from cluster.state import read_state
    from cluster.weights import weights_url
    from shared.errors import StageUnavailableError
    from shared.settings import load_settings
    from shared.weights import WeightStore

    running_mesh_url(name)  # says why when there is none
    var_dir = load_settings().var_dir
    state = read_state(MeshFolders.of(var_dir, name).state)
    if state is None or not state.store_url:
        raise StageUnavailableError(f"mesh {name} has no store yet", stage="store")
    mesh = load_mesh(path or DEFAULT_PATH, name)
    store = mesh.store.client
    if mesh.store.kind == "embedded":
        store = store.model_copy(update={"url": state.store_url, "topology": "single"})
    return mesh, store, WeightStore(weights_url(mesh, var_dir))


def _once(
    name: str,
    place: tuple[MeshConfig, StoreConfig, WeightStore],
    join: JoinConfig,
    limits: RecalibrationConfig,
    dry_run: bool,
    as_json: bool,
    *,
    fails: bool,
) -> None:
    """Join, refit, publish, and say so; what goes wrong ends the verb only where it is not to be done again."""
    from rich.console import Console

    from shared.clock import SystemClock
    from shared.errors import RankMeshError
    from training.recalibration import is_news, publish_refit, published_parts, refit

    mesh, store, weights = place
    try:
        base = _serving(name)
        _, calibration, gain, costs = published_parts(weights, base)
        depths = tuple(int(key.rpartition(".")[2]) for key in calibration.tensors())
        outcomes = asyncio.run(_read(mesh, store, base, depths, SystemClock().now_s(), join))
        found = refit(calibration, gain, costs, outcomes, limits)
        delta = None
        if found is not None and not dry_run and is_news(weights, base, found, outcomes, limits):
            delta = publish_refit(weights, base, found)
    except RankMeshError as error:
        if fails:
            raise
        Console(stderr=True, highlight=False).print(f"not this time: {error.message}", style="yellow")
        return
    if as_json:
        sys.stdout.write(json.dumps(_document(base, outcomes, found, delta)) + "\n")
    else:
        _show(base, outcomes, found, delta, limits, dry_run)


def _serving(name: str) -> str:
    """Return the weights version that a mesh serves, without its deltas."""
    from cluster.cli.client import Client
    from cluster.cli.locate import running_mesh_url
    from services.ingress.directory import StatusBody
    from shared.weights.deltas import parse_stamp

    with Client(running_mesh_url(name)) as client:
        return parse_stamp(client.fetch(StatusBody, "/v1/status").version)[0]


async def _read(
    mesh: MeshConfig, store: StoreConfig, base: str, depths: tuple[int, ...], now_s: float, join: JoinConfig
) -> Outcomes:
    from shared.userlog import RedisUserLog, connect
    from shared.userlog.explored import RedisExploredLog
    from training.outcomes import read_outcomes

    client, config = connect(store), mesh.user_log()
    try:
        explored = RedisExploredLog(client, config.namespace, mesh.store.explored)
        return await read_outcomes(explored, RedisUserLog(client, config), base, depths, now_s, join)
    finally:
        await client.aclose()


def _document(base: str, outcomes: Outcomes, found: Refit | None, delta: Delta | None) -> dict[str, object]:
    ratios = {} if found is None else found.ratios
    worth = None if found is None or found.gain is None else found.gain.worth.tolist()
    return {
        "version": base,
        "counts": outcomes.counts,
        "calibration": {depth: {"published": before, "refitted": after} for depth, (before, after) in ratios.items()},
        "worth": worth,
        "delta": None if delta is None else delta.stamp,
    }


def _show(
    base: str,
    outcomes: Outcomes,
    found: Refit | None,
    delta: Delta | None,
    limits: RecalibrationConfig,
    dry_run: bool,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    counts = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in outcomes.counts.items() if number)
    console.print(f"weights {base}: {counts or 'no explored answers'}", soft_wrap=True)
    if found is None:
        users = outcomes.counts.get("users", 0)
        needed = f"{limits.outcomes_min} outcomes of {limits.users_min} users"
        console.print(f"nothing to do: {needed} are needed, there are {len(outcomes)} of {users}")
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("depth", "mean over rate, published", "refitted", "worth"):
        table.add_column(title, justify="right")
    for column, depth in enumerate(outcomes.depths):
        worth = "" if found.gain is None or depth == 0 else f"{found.gain.worth[column]:.2f}"
        said = [f"{ratio:.3f}" for ratio in found.ratios[depth]] if depth in found.ratios else ["no click", "no click"]
        table.add_row(str(depth), *said, worth)
    console.print(table)
    if delta is not None:
        console.print(f"published as {delta.stamp}")
    elif dry_run:
        console.print("not published: a dry run")
    else:
        console.print(f"not published: predictions would change by less than {limits.change_min:.2%}")
