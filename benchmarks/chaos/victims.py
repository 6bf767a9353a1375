"""Finds the processes of a mesh that a fault is aimed at, by what they call themselves in ``/proc``.

Not by what the mesh's status says: a second fault must find its victim while the first one has made the status mute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.local import Mesh
from cluster.names import APP, deployment_name
from cluster.processes import Process, members
from shared.errors import StageUnavailableError
from shared.userlog import EmbeddedStore


@dataclass(frozen=True, slots=True)
class Title:
    """A process and its command line.

    Args:
        process: The process.
        words: Its arguments; a process of Ray replaces them with one title.
    """

    process: Process
    words: tuple[str, ...]


def titles(mesh_id: str) -> list[Title]:
    """Return every process of a mesh with its command line, oldest first."""
    found = []
    for process in members(mesh_id):
        try:
            text = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        found.append(Title(process, tuple(text.strip("\0 ").split("\0"))))
    return sorted(found, key=lambda title: title.process.started_ticks)


def matching(target: str, found: Iterable[Title]) -> list[Process]:
    """Return the processes that a target stands for, oldest first.

    Args:
        target: A station; ``controller``, Serve's; ``gcs``, Ray's control store; ``door``, what listens on the mesh's
            port; ``node``, a raylet that is not the first one's.
        found: All processes of the mesh, oldest first.
    """
    return [title.process for title in found if _is(target, title.words)]


def victims(target: str, mesh: Mesh) -> list[Process]:
    """Return the processes of a running mesh that a target stands for, oldest first."""
    if target == "store":  # it writes its title over its environment, by which a mesh knows its processes
        running = EmbeddedStore(mesh.folders.store).running()
        return [] if running is None else [Process(running.pid, running.started_ticks or 0)]
    return matching(target, titles(mesh.state.mesh_id))


def choose(target: str, mesh: Mesh, pick: float) -> Process:
    """Return one victim.

    Args:
        target: See ``matching``.
        mesh: The mesh.
        pick: Which one, as a share in 0..1 of their list.

    Raises:
        StageUnavailableError: there is none now.
    """
    found = victims(target, mesh)
    if not found:
        raise StageUnavailableError(f"no process of {target} runs", stage=target)
    return found[min(int(pick * len(found)), len(found) - 1)]


def _is(target: str, words: tuple[str, ...]) -> bool:
    program = Path(words[0].partition(" ")[0]).name
    if target == "controller":
        return words[0].startswith("ray::ServeController")
    if target == "door":  # HAProxy, or Serve's own proxy where that listens
        return program == "haproxy" or words[0].startswith("ray::ProxyActor")
    if target == "gcs":
        return program == "gcs_server"
    if target == "node":
        return program == "raylet" and "--head" not in words
    title, _, rest = words[0].partition(f"{APP}:{deployment_name(target)}")
    return title == "ray::ServeReplica:" and not rest[:1].isalnum() and not rest.startswith("-")
