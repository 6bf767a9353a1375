"""Draws the state of a mesh for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.ingress.directory import DeploymentStatus, ReplicaStatus, RolloutBody, StatusBody

_STATE_STYLES = {"ready": "green", "starting": "yellow", "down": "bold red"}
_STATE_SIGNS = {"ready": "●", "starting": "○", "down": "■"}
_COUNTERS_WIDTH_MIN = 110
_COUNTERS_MAX = 4
_PHASE_STYLES = {
    "none": "",
    "loading": "yellow",
    "canary": "yellow",
    "served": "green",
    "refused": "bold red",
    "rolled_back": "bold yellow",
}


def status_table(status: StatusBody, url: str, width: int) -> RenderableType:
    """Draw one line a replica, headed by the state of the whole.

    Args:
        status: Body of ``GET /v1/status``.
        url: Where it was asked.
        width: Columns of the terminal; counters are shown where there is room.
    """
    num_ready = sum(replica.state == "ready" for station in status.deployments for replica in station.replicas)
    num_wanted = sum(station.target for station in status.deployments)
    word, style = _health(status)
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_column(style="bright_black", no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row(
        "mesh", Text.assemble((status.name, "bold"), "  ", (word, style), f"  {num_ready} of {num_wanted} replicas")
    )
    head.add_row("at", url)
    head.add_row("weights", status.version)
    if status.rollout.phase != "none":
        head.add_row("roll-out", rollout_text(status.rollout))
    if status.updates.reason:
        head.add_row("updates", Text(f"delta {status.updates.newest} is not served: {status.updates.reason}", "yellow"))
    if kernels := _kernels(status):
        head.add_row("kernels", kernels)
    for name, replicas in status.silent.items():
        head.add_row(name, Text(f"no answer from {', '.join(replicas)}: left out by {status.replica}", "bold yellow"))
    for station in status.deployments:
        if station.reason:
            head.add_row(station.name, Text(f"a replica does not start: {station.reason}", "bold red"))
    store_sign = _sign("ready" if status.store.healthy else "down")
    head.add_row("store", Text.assemble(store_sign, f"  {status.store.kind}, {status.store.url}"))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bright_black")
    for column in ("station", "up", "replica", "state"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    table.add_column("pid", justify="right")
    table.add_column("weights", no_wrap=True, overflow="ellipsis")
    wide = width >= _COUNTERS_WIDTH_MIN
    if wide:
        table.add_column("counted", overflow="fold", style="bright_black")
    for station in status.deployments:
        _add_station(table, station, status.version, wide)
    return Group(head, Text(""), table)


def rollout_text(rollout: RolloutBody) -> Text:
    """Say in one line how far a roll-out is, or how it ended."""
    style = _PHASE_STYLES[rollout.phase]
    text = Text.assemble((rollout.phase.replace("_", " "), style), f"  {rollout.version}")
    if rollout.phase == "canary":
        text.append(f" to {rollout.share:.1%} of the users")
    if rollout.phase == "served" and rollout.previous:
        text.append(f", {rollout.previous} is ready for a roll-back")
    if rollout.reason:
        text.append(f": {rollout.reason}")
    measured = rollout.figures
    if measured.get("canary_answers"):
        bad, answers = measured["canary_bad"], measured["canary_answers"]
        text.append(f" ({answers:.0f} answers, {bad:.0f} of them degraded or failed", "bright_black")
        if "canary_ne" in measured:
            before, now, labels = measured["base_ne"], measured["canary_ne"], measured["labels"]
            text.append(f"; NE {now:.4f}, before {before:.4f}, on {labels:.0f} labelled events", "bright_black")
        text.append(")", "bright_black")
    return text


def _add_station(table: Table, station: DeploymentStatus, version: str, wide: bool) -> None:
    num_ready = sum(replica.state == "ready" for replica in station.replicas)
    count = Text(f"{num_ready}/{station.target}", style="" if num_ready >= station.target else "bold yellow")
    if not station.replicas:
        table.add_row(Text(station.name, style="bold"), count, Text("none", style="bold red" if station.target else ""))
    for index, replica in enumerate(station.replicas):
        first = index == 0
        cells = [
            Text(station.name, style="bold") if first else "",
            count if first else "",
            replica.id,
            _sign(replica.state),
            "" if replica.pid is None else str(replica.pid),
            _held(replica, version),
        ]
        table.add_row(*cells, *([_counted(replica)] if wide else []))


def _health(status: StatusBody) -> tuple[str, str]:
    if (
        any(
            station.target > 0 and all(replica.state == "down" for replica in station.replicas)
            for station in status.deployments
        )
        or not status.store.healthy
    ):
        return "degraded", "bold red"
    if any(
        sum(replica.state == "ready" for replica in station.replicas) < station.target for station in status.deployments
    ):
        return "starting", "bold yellow"
    return ("ready", "bold green") if status.ready else ("not ready", "bold yellow")


def _kernels(status: StatusBody) -> str:
    """Return how the network is executed: once where all stations agree, which is usual, else by station.

    Each replica has measured for itself, so reasons differ in their figures: one is shown for all of one choice.
    """
    stations: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for station in status.deployments:
        for execution in {replica.execution for replica in station.replicas if replica.execution is not None}:
            choice = execution.partition(" (")[0]
            if station.name not in stations.setdefault(choice, []):
                stations[choice].append(station.name)
            shown.setdefault(choice, execution)
    if len(shown) <= 1:
        return next(iter(shown.values()), "")
    return "; ".join(f"{', '.join(names)}: {shown[choice]}" for choice, names in stations.items())


def _sign(state: str) -> Text:
    return Text(f"{_STATE_SIGNS[state]} {state}", style=_STATE_STYLES[state])


def _held(replica: ReplicaStatus, version: str) -> Text:
    """Return the weights of a replica; those that the mesh serves, shown in the head, as a tick."""
    if replica.version is None:
        return Text("-", style="bright_black")
    if refused := next(iter(replica.refused.values()), ""):
        return Text(f"refused: {refused}", style="bold red")
    if replica.loading:
        return Text(f"reads {replica.loading[0]}", style="yellow")
    is_served = version in replica.held or replica.version == version
    return Text("✓", style="green") if is_served else Text(replica.version, style="yellow")


def _counted(replica: ReplicaStatus) -> str:
    largest = sorted(replica.counters.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {count:,}" for name, count in largest[:_COUNTERS_MAX] if count)
