"""Finds and ends the processes of one mesh, whatever became of their parents.

Every process that a mesh starts inherits a variable with the mesh's own random id. The system keeps it readable for
the whole life of the process (Linux), also when the process has a new title or its parent is gone. So a mesh is ended
by what belongs to it, never by the name of a program: two meshes, or another user of Ray, do not notice.

Standard library only: the guardian runs this with nothing else loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MESH_VARIABLE = "RANKMESH_MESH_ID"
"""Variable that carries the id; nothing reads it but this module, through ``/proc``."""

POLL_PERIOD_S = 0.05
"""Between two looks at something that is cheap to look at, seconds."""

_EXEC_LOOKS = 2_000
"""How often a process that is just starting a program is looked at again; on an idle machine it takes microseconds."""


class Waiter(Protocol):
    """The two things that are needed of a clock."""

    def monotonic_s(self) -> float:
        """Return seconds that only grow."""
        ...

    def block_s(self, duration_s: float) -> None:
        """Block the calling thread."""
        ...


@dataclass(frozen=True, slots=True)
class Process:
    """One process; the start time tells it from a later one with the same id.

    Args:
        pid: Process id.
        started_ticks: Start, in the system's ticks since boot.
        mesh_id: Mesh whose id it must carry to be taken for it; empty: it need not. What a file says is no proof.
    """

    pid: int
    started_ticks: int
    mesh_id: str = ""

    def is_alive(self) -> bool:
        """Return whether it still runs; one that has ended and waits for its parent to notice does not."""
        if started_ticks(self.pid) != self.started_ticks:
            return False
        return not self.mesh_id or _mark(self.mesh_id) in _variables(Path(f"/proc/{self.pid}"))

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def started_ticks(pid: int) -> int | None:
    """Return when a running process started, in ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold spaces: count from the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def members(mesh_id: str, besides: Iterable[int] = ()) -> list[Process]:
    """Return the running processes of a mesh, this one and those of ``besides`` left out."""
    wanted = _mark(mesh_id)
    skipped = {os.getpid(), *besides}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in skipped:
            continue
        ticks = started_ticks(int(entry.name)) if wanted in _variables(entry) else None
        if ticks is not None:
            found.append(Process(int(entry.name), ticks))
    return found


def _mark(mesh_id: str) -> bytes:
    return f"{MESH_VARIABLE}={mesh_id}".encode()


def _variables(process: Path) -> list[bytes]:
    """Return the variables that a process was started with; none for another user's, or one that is gone meanwhile."""
    for _ in range(_EXEC_LOOKS):
        try:
            variables = (process / "environ").read_bytes()
            if variables or not _is_between_programs(process):
                return variables.split(b"\0")
        except OSError:
            return []
        os.sched_yield()
    return []


def _is_between_programs(process: Path) -> bool:
    """Return whether a process has left one program and not yet begun the next: its variables are empty meanwhile."""
    fields = (process / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    has_memory, end_of_variables = fields[20] != "0", fields[48]
    return has_memory and end_of_variables == "0"


def end_members(mesh_id: str, clock: Waiter, grace_s: float, besides: Iterable[int] = ()) -> list[Process]:
    """End every process of a mesh: asked first, killed after ``grace_s`` seconds.

    Args:
        mesh_id: The mesh.
        clock: Measures the grace.
        grace_s: Seconds between asking and killing; 0: kill at once.
        besides: Process ids to spare.

    Returns:
        What is still alive in the end: nothing, unless the system does not let it end.
    """
    spared = tuple(besides)
    if grace_s > 0:
        for process in members(mesh_id, spared):
            process.send(signal.SIGTERM)
        wait_until(lambda: not members(mesh_id, spared), clock, grace_s)
    for _ in range(20):  # a dying parent may have started another one meanwhile
        left = members(mesh_id, spared)
        if not left:
            return []
        for process in left:
            process.send(signal.SIGKILL)
        clock.block_s(POLL_PERIOD_S)
    return members(mesh_id, spared)


def wait_until(condition: Callable[[], bool], clock: Waiter, timeout_s: float, period_s: float = POLL_PERIOD_S) -> bool:
    """Poll a condition until it holds or time is up; returns whether it held."""
    end_s = clock.monotonic_s() + timeout_s
    while not condition():
        if clock.monotonic_s() >= end_s:
            return False
        clock.block_s(period_s)
    return True
