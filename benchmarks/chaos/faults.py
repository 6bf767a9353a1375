"""The faults: each is put in, and later taken back, in a real mesh."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos.memory import MemoryCell
from benchmarks.chaos.schedule import Planned
from benchmarks.chaos.spaces import Spaces
from benchmarks.chaos.victims import choose
from cluster.desk import RolloutRequest
from cluster.local import Mesh
from cluster.processes import Process
from shared.clock import Clock, set_skew
from shared.errors import StageUnavailableError
from shared.userlog.client import guard
from shared.weights import WeightStore

SLOW_PERIOD_S = 0.2
"""A slow process is stopped for a share of each of these."""

_STORE_TIMEOUT_MS = 5_000
_TINY_STORE = "1mb"


@dataclass(slots=True)
class Scene:
    """What faults act on.

    Args:
        mesh: The mesh.
        store: Client of its store.
        weights: Its weight store, a folder of this machine.
        refill: Puts the histories back into an empty store.
        clock: Time.
        spaces: Namespaces of its nodes, where they have any.
        forget: Told before the histories are lost.
    """

    mesh: Mesh
    store: Any
    weights: WeightStore
    refill: Callable[[], Awaitable[None]]
    clock: Clock
    spaces: Spaces | None = None
    forget: Callable[[], None] = lambda: None


class Fault(Protocol):
    """One fault in a mesh."""

    async def inject(self) -> str:
        """Put it in; returns what was done in a few words."""
        ...

    async def heal(self) -> str:
        """Take it back; nothing for a kill. Returns what was found then in a few words."""
        ...


@dataclass(slots=True)
class KillFault:
    """SIGKILL."""

    scene: Scene
    planned: Planned

    async def inject(self) -> str:
        """Kill the victim."""
        victim = await _victim(self.scene, self.planned)
        victim.send(signal.SIGKILL)
        return f"process {victim.pid}"

    async def heal(self) -> str:
        """Nothing: the mesh replaces what was killed."""
        return ""


@dataclass(slots=True)
class StopFault:
    """SIGSTOP, then SIGCONT: a process that falls silent and wakes, its connections open."""

    scene: Scene
    planned: Planned
    _victim: Process | None = None

    async def inject(self) -> str:
        """Stop the victim."""
        self._victim = await _victim(self.scene, self.planned)
        self._victim.send(signal.SIGSTOP)
        return f"process {self._victim.pid}"

    async def heal(self) -> str:
        """Let it go on, if nobody has replaced it."""
        if self._victim is not None:
            self._victim.send(signal.SIGCONT)
        return ""


@dataclass(slots=True)
class SlowFault:
    """Stopped and continued again and again: a process that gets a share of its time."""

    scene: Scene
    planned: Planned
    _task: asyncio.Task[None] | None = None

    async def inject(self) -> str:
        """Begin."""
        victim = await _victim(self.scene, self.planned)
        self._task = asyncio.create_task(self._stutter(victim))
        return f"process {victim.pid}"

    async def heal(self) -> str:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        return ""

    async def _stutter(self, victim: Process) -> None:
        share, clock = self.planned.plan.stopped_share, self.scene.clock
        try:
            while victim.is_alive():
                victim.send(signal.SIGSTOP)
                await clock.sleep_s(SLOW_PERIOD_S * share)
                victim.send(signal.SIGCONT)
                await clock.sleep_s(SLOW_PERIOD_S * (1 - share))
        finally:
            victim.send(signal.SIGCONT)


@dataclass(slots=True)
class FullStoreFault:
    """A store that refuses writes, and evicts what has a time to live: the speculative embeddings."""

    scene: Scene
    planned: Planned
    _before: str = ""

    async def inject(self) -> str:
        """Lower its memory limit under what it holds."""
        self._before = (await self._ask("config_get", "maxmemory"))["maxmemory"]
        await self._ask("config_set", "maxmemory", _TINY_STORE)
        return f"maxmemory {_TINY_STORE}"

    async def heal(self) -> str:
        """Put the limit back."""
        await self._ask("config_set", "maxmemory", self._before)
        return ""

    async def _ask(self, command: str, *words: str) -> Any:
        return await guard(getattr(self.scene.store, command)(*words), _STORE_TIMEOUT_MS, command)


@dataclass(slots=True)
class LostDataFault:
    """A store that has lost everything, and is filled again by whoever keeps the log for good."""

    scene: Scene
    planned: Planned

    async def inject(self) -> str:
        """Empty it."""
        self.scene.forget()
        await guard(self.scene.store.flushall(), _STORE_TIMEOUT_MS, "flushall")
        return "flushall"

    async def heal(self) -> str:
        """Fill it again."""
        await self.scene.refill()
        return ""


@dataclass(slots=True)
class BadWeightsFault:
    """A version that is not what its manifest says, rolled out over the running mesh."""

    scene: Scene
    planned: Planned
    spoil: Callable[[Path], None]
    _folder: Path | None = field(default=None)

    async def inject(self) -> str:
        """Publish a copy of the served version, spoil its largest file, and ask for its roll-out."""
        store, served = self.scene.weights, self.scene.mesh.version
        version = f"20990101-000000-{int(self.planned.at_s * 1000) % 16**8:08x}"
        await asyncio.to_thread(_copy_version, store, served, version)
        self._folder = Path(str(store.root), version)
        files = [path for path in self._folder.rglob("*.safetensors") if path.is_file()]
        await asyncio.to_thread(self.spoil, max(files, key=lambda path: path.stat().st_size))
        request = RolloutRequest(id=version[-8:], action="rollout", version=version, share=0.0, watch_s=0.0)
        request.write(self.scene.mesh.folders.root)
        return f"version {version}"

    async def heal(self) -> str:
        """Remove the version."""
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        return ""


@dataclass(slots=True)
class PartitionFault:
    """A node whose cable is unplugged: it runs on, and nobody reaches it."""

    scene: Scene
    planned: Planned
    _number: int = 0

    async def inject(self) -> str:
        """Unplug it."""
        self._number = number = _node_number(self.scene, self.planned)
        await asyncio.to_thread(_spaces(self.scene).cut, number)
        return f"node {number}"

    async def heal(self) -> str:
        """Plug it in again."""
        if self._number:
            await asyncio.to_thread(_spaces(self.scene).mend, self._number)
        return ""


@dataclass(slots=True)
class LossyFault:
    """A node that loses a share of its packets, in either direction."""

    scene: Scene
    planned: Planned
    _number: int = 0

    async def inject(self) -> str:
        """Begin."""
        self._number = number = _node_number(self.scene, self.planned)
        await asyncio.to_thread(_spaces(self.scene).lose, number, self.planned.plan.lost_share)
        return f"node {number}"

    async def heal(self) -> str:
        """End; says how much was lost."""
        if not self._number:
            return ""
        lost = await asyncio.to_thread(_spaces(self.scene).lose_no_more, self._number)
        return f"lost {lost:.1%} of its packets"


@dataclass(slots=True)
class ClockFault:
    """A replica whose wall clock is wrong; what only measures time does not go by it."""

    scene: Scene
    planned: Planned
    _victim: Process | None = None

    async def inject(self) -> str:
        """Make it jump."""
        victim = await _victim(self.scene, self.planned)
        await asyncio.to_thread(_jump, self.scene, victim, self.planned.plan.skew_s)
        self._victim = victim
        return f"process {victim.pid}, {self.planned.plan.skew_s:+.0f} s"

    async def heal(self) -> str:
        """Make it jump back, if nobody has replaced it."""
        if self._victim is not None and self._victim.is_alive():
            await asyncio.to_thread(_jump, self.scene, self._victim, 0.0)
        return ""


@dataclass(slots=True)
class MemoryFault:
    """A replica that the system ends for want of memory."""

    scene: Scene
    planned: Planned
    _cell: MemoryCell | None = None
    _victim: Process | None = None

    async def inject(self) -> str:
        """Shut it in with what uses up the memory."""
        self._victim = await _victim(self.scene, self.planned)
        self._cell = MemoryCell(self.planned.plan.memory_bytes)
        await asyncio.to_thread(self._cell.press, self._victim.pid)
        return f"process {self._victim.pid}"

    async def heal(self) -> str:
        """Let it out; says whether it was ended."""
        if self._cell is None or self._victim is None:
            return ""
        killed = await asyncio.to_thread(self._cell.release)
        return "ended by the system" if killed and not self._victim.is_alive() else "not ended by the system"


def make_fault(scene: Scene, planned: Planned) -> Fault:
    """Return the fault that a schedule plans."""
    match planned.plan.kind:
        case "kill":
            return KillFault(scene, planned)
        case "stop":
            return StopFault(scene, planned)
        case "slow":
            return SlowFault(scene, planned)
        case "full":
            return FullStoreFault(scene, planned)
        case "lose_data":
            return LostDataFault(scene, planned)
        case "corrupt_weights":
            return BadWeightsFault(scene, planned, flip_byte)
        case "half_weights":
            return BadWeightsFault(scene, planned, cut_in_half)
        case "partition":
            return PartitionFault(scene, planned)
        case "lossy":
            return LossyFault(scene, planned)
        case "clock":
            return ClockFault(scene, planned)
        case "memory":
            return MemoryFault(scene, planned)


def flip_byte(path: Path) -> None:
    """Flip the bits of one byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))


def cut_in_half(path: Path) -> None:
    """Drop the second half of a file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _copy_version(store: WeightStore, served: str, version: str) -> None:
    """Write the content of a version under another name, manifest last, as a publisher does."""
    reader = store.open(served)
    with store.writer(version) as writer:
        for group in reader.groups():
            writer.add_tensors(group, reader.tensors(group))
        for name in reader.manifest.documents:
            writer.add_json(name, reader.json(name))
        writer.commit()


async def _victim(scene: Scene, planned: Planned) -> Process:
    return await asyncio.to_thread(choose, planned.plan.target, scene.mesh, planned.pick)


def _jump(scene: Scene, victim: Process, skew_s: float) -> None:
    try:
        set_skew(clock_folder(scene.mesh.folders.root.parent), victim.pid, skew_s)
    except FileNotFoundError as error:
        raise StageUnavailableError(f"process {victim.pid} has not read its wall clock", stage="clock") from error


def clock_folder(folder: Path) -> Path:
    """Return where the processes of a mesh look how wrong their clocks are.

    Args:
        folder: Of the scenario.
    """
    return folder / "clocks"


def _spaces(scene: Scene) -> Spaces:
    if scene.spaces is None:
        raise StageUnavailableError("the nodes of this mesh have no network namespaces", stage="node")
    return scene.spaces


def _node_number(scene: Scene, planned: Planned) -> int:
    """Return which node a fault is aimed at: any but the first, where the load and the store are."""
    others = _spaces(scene).num_nodes - 1
    return 1 + min(int(planned.pick * others), others - 1)
