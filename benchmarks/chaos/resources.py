"""What the processes of a mesh hold, sampled while it runs: memory, descriptors, threads, stores, connections.

Read from outside, through ``/proc``, the raylet's own dump of its state and one INFO of the store: the mesh does not
know that it is looked at. Memory is what a process holds for itself and its mapped files; pages of the object store,
which every process of a node maps, are counted there once.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import orjson
from pydantic import Field

from benchmarks.chaos.slopes import Bound, Resource, Slope, fit
from benchmarks.chaos.victims import titles
from cluster.environment import MeshFolders
from cluster.local import Mesh
from cluster.names import APP, station_name
from cluster.priority import quiet_threads
from cluster.processes import Process, started_ticks
from shared.clock import Clock
from shared.config import Config
from shared.errors import StoreUnavailableError
from shared.userlog import EmbeddedStore
from shared.userlog.client import guard

LAB = "lab"
"""The process that sends, breaks and judges."""

MESH = "mesh"
"""What is one for the whole mesh."""

_STORE_TIMEOUT_MS = 2_000
_REPLICA = re.compile(rf"ray::ServeReplica:{APP}:([a-z0-9-]+)")
_PLASMA = re.compile(r'"(total|available)": ?\{[^}]*?object_store_memory: \[(\d+)\]')
_PLASMA_UNITS = 10_000
_KIB = 1_024

Key: TypeAlias = tuple[Resource, str, int]
"""Resource, part, and the process that it is a series of."""


class ResourcePlan(Config):
    """What is sampled, and how fast it may grow.

    Args:
        period_s: Between two samples.
        settle_s: A process younger than this is not looked at: it loads, and fills its caches.
        span_min_s: What was seen for a shorter time is shown and not judged.
        bounds: Growth that is allowed, by resource.
    """

    period_s: float = Field(10.0, gt=0, le=600)
    settle_s: float = Field(120.0, ge=0, le=3_600)
    span_min_s: float = Field(600.0, gt=0)
    bounds: dict[Resource, Bound] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds.

    Args:
        rss: Bytes, without pages of shared memory.
        descriptors: Open ones.
        threads: Its threads.
    """

    rss: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Resources:
    """Samples of a run.

    Args:
        mesh: The mesh.
        store: Client of its store.
        plan: How often.
        clock: Time.
        file: Every sample goes here as it is taken.
        series: Time and value, of each resource of each process.
    """

    mesh: Mesh
    store: Any
    plan: ResourcePlan
    clock: Clock
    file: BinaryIO
    series: dict[Key, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    async def watch(self, began_s: float) -> None:
        """Sample until this is cancelled.

        Args:
            began_s: When the load began.
        """
        with quiet_threads(1) as thread:
            loop = asyncio.get_running_loop()
            while True:
                at_s = self.clock.monotonic_s() - began_s
                found = await loop.run_in_executor(thread, self._read)
                found |= await self._ask_store()
                for key, value in found.items():
                    self.series[key].append((at_s, value))
                row = {f"{resource} {part} {serial}": value for (resource, part, serial), value in found.items()}
                self.file.write(orjson.dumps({"at_s": round(at_s, 2), **row}) + b"\n")
                self.file.flush()
                await self.clock.sleep_s(self.plan.period_s - (self.clock.monotonic_s() - began_s - at_s))

    def slopes(self) -> list[Slope]:
        """Return how each resource of each part grew, by resource, the largest level first."""
        parts: dict[tuple[Resource, str], list[list[tuple[float, float]]]] = defaultdict(list)
        for (resource, part, _), samples in self.series.items():
            settled_s = samples[0][0] + self.plan.settle_s
            parts[resource, part].append([each for each in samples if each[0] >= settled_s])
        found = [
            slope
            for (resource, part), series in parts.items()
            if (slope := fit(resource, part, series, self._bound(resource, part), self.plan.span_min_s)) is not None
        ]
        order: list[Resource] = ["rss", "descriptors", "threads", "object_store", "store", "connections"]
        return sorted(found, key=lambda each: (order.index(each.resource), -each.level))

    def _bound(self, resource: Resource, part: str) -> Bound | None:
        """Return how fast a part may grow; the lab is none of the mesh: it remembers every request until its report."""
        return None if part == LAB else self.plan.bounds.get(resource)

    def _read(self) -> dict[Key, float]:
        """Return everything that is read from files now."""
        found: dict[Key, float] = {}
        store = EmbeddedStore(self.mesh.folders.store).running()
        known = [] if store is None else [("store", Process(store.pid, store.started_ticks or 0))]
        known += [(part_of(title.words), title.process) for title in titles(self.mesh.state.mesh_id)]
        known.append((LAB, Process(os.getpid(), started_ticks(os.getpid()) or 0)))
        for part, process in known:
            if (held := held_by(process.pid)) is not None and process.is_alive():
                serial = process.pid + process.started_ticks * 2**22  # a process id may come again
                found["rss", part, serial] = held.rss
                found["descriptors", part, serial] = held.descriptors
                found["threads", part, serial] = held.threads
        if (used := object_store_bytes(self.mesh.folders)) is not None:
            found["object_store", MESH, 0] = used
        return found

    async def _ask_store(self) -> dict[Key, float]:
        with suppress(StoreUnavailableError):
            told = await guard(self.store.info("everything"), _STORE_TIMEOUT_MS, "info")
            serial = int(told["process_id"])
            return {
                ("connections", "store", serial): told["connected_clients"],
                ("store", "store", serial): told["used_memory"],
            }
        return {}


def part_of(words: tuple[str, ...]) -> str:
    """Return which part of a mesh a process is, by its command line."""
    if found := _REPLICA.match(words[0]):
        return station_name(found[1])
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0].partition(":")[0].strip()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    scripts = [Path(word) for word in words[1:3] if word.endswith(".py")]
    if scripts:
        return f"{scripts[0].parent.name}/{scripts[0].stem}"
    return Path(words[0].partition(" ")[0]).name


def held_by(pid: int) -> Held | None:
    """Return what a process holds; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "RssAnon" not in fields:  # it has ended, and waits for its parent to notice
        return None
    kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return Held(kib * _KIB, descriptors, int(fields["Threads"]))


def object_store_bytes(folders: MeshFolders) -> int | None:
    """Return what the object store of a mesh of one node holds, as its raylet last wrote; None when it has not."""
    dumps = folders.runtime.glob("session_2*/logs/debug_state.txt")
    try:
        newest = max(dumps, key=lambda path: path.stat().st_mtime, default=None)
        return None if newest is None else parse_object_store(newest.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # it is just being replaced
        return None


def parse_object_store(text: str) -> int | None:
    """Return the used bytes in a raylet's dump of its state; None when it says nothing of them."""
    line = next((line for line in text.splitlines() if line.startswith("Local id:")), "")
    amounts = {name: int(value) for name, value in _PLASMA.findall(line.partition("Cluster resources")[0])}
    if len(amounts) < 2:
        return None
    return (amounts["total"] - amounts["available"]) // _PLASMA_UNITS


def totals(
    series: dict[Key, list[tuple[float, float]]], resource: Resource, points_max: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Return a resource of each part over time, all its processes together.

    Args:
        series: Of ``Resources``.
        resource: Which.
        points_max: Most points in time; of more, some are left out.

    Returns:
        Times in seconds, and for each part a value at each.
    """
    sums: dict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for (name, part, _), samples in series.items():
        if name == resource:
            for at_s, value in samples:
                sums[part][at_s] += value
    times = sorted(set().union(*sums.values()))
    times = times[:: max(1, -(-len(times) // points_max))]
    return times, {part: [values[at_s] for at_s in times] for part, values in sums.items()}


def largest(parts: dict[str, list[float]], number: int) -> Iterable[tuple[str, list[float]]]:
    """Return the parts with the largest values, the largest first."""
    return sorted(parts.items(), key=lambda item: -max(item[1]))[:number]
