"""Replicas, and the calls between them: what a real mesh does to a call, by a seed and without a wire.

A call takes its arguments from the calls that they stand for, travels, waits for a replica, runs there, and its answer
travels back. On the way it may be slow, its replica may die (the caller is told) or fall silent (nobody is told), its
answer or its cancellation may be lost, it may arrive twice, or all ways to a station may be long for a while.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from cluster.simulation.loop import SimulatedLoop
from shared.breaker import Breakers, Trip
from shared.errors import OverloadedError, RankMeshError, StageUnavailableError
from shared.handle import TRIES, LocalCall

TOLD_S = 0.020
"""Between a process's death and the caller's learning of it."""

QUEUE_PERIOD_S = 0.005
"""How often a call that waits looks for a replica with room."""


@dataclass(frozen=True, slots=True)
class WireConfig:
    """How calls travel.

    Args:
        delay_s_max: Longest way of a message in quiet times.
        lost_share: Share of the answers that are lost.
        lost_cancel_share: Share of the cancellations that are lost.
        doubled_share: Share of the calls that arrive twice; the second time later, for nobody.
        ongoing_max: Calls that a replica works on.
        queued_max: Calls that wait for a replica in one caller.
    """

    delay_s_max: float = 0.002
    lost_share: float = 0.0
    lost_cancel_share: float = 0.0
    doubled_share: float = 0.0
    ongoing_max: int = 16
    queued_max: int = 32


@dataclass(slots=True)
class CallRecord:
    """One call that was made.

    Args:
        station: Of whom.
        method: What.
        asker: Task that made it: the request, or work after one.
        started_s: When it was made.
        began_s: When a replica began it.
        ended_s: When that replica ended it.
        is_excused: Its cancellation was lost, or its replica was silent: nobody could end it in time.
        caller: Ingress replica that made it.
        tries: Replica that it tries, whose breaker is open; empty for a call that somebody waits for.
        replica: That got it last.
        left_s: When its caller left it to try that replica: nobody waits for its answer any longer.
    """

    station: str
    method: str
    asker: str
    started_s: float
    began_s: float | None = None
    ended_s: float | None = None
    is_excused: bool = False
    caller: str = ""
    tries: str = ""
    replica: str = ""
    left_s: float | None = None


class Replica:
    """One process of a station.

    Args:
        name: Unique in the life of the mesh.
        service: What answers.
    """

    def __init__(self, name: str, service: Any) -> None:
        self.name = name
        self.service = service
        self.is_alive = True
        self.slow_s = 0.0
        self.is_failing = False
        self.running: dict[asyncio.Task[Any], None] = {}  # in order: a set of tasks is ordered by their addresses
        self._mail: list[Callable[[], object]] | None = None

    def kill(self) -> None:
        """End it; calls in flight end with it."""
        self.is_alive = False
        for task in list(self.running):
            task.cancel()

    @property
    def is_silent(self) -> bool:
        """Whether it does nothing with what arrives."""
        return self._mail is not None

    def fall_silent(self) -> None:
        """Stop, as by a signal: what arrives waits."""
        self._mail = self._mail or []

    def wake(self) -> None:
        """Go on with what has arrived meanwhile, in its order."""
        mail, self._mail = self._mail or [], None
        for deliver in mail:
            deliver()

    def receive(self, deliver: Callable[[], object]) -> None:
        """Do something now, or when it wakes."""
        if self._mail is None:
            deliver()
        else:
            self._mail.append(deliver)


@dataclass(slots=True)
class Station:
    """A deployment.

    Args:
        name: As in handles.
        build: Makes the service of a replica that starts.
        replicas: The live ones and those that are not yet known to be dead.
        num_started: Replicas that ever were.
    """

    name: str
    build: Callable[[str], Any]
    replicas: list[Replica] = field(default_factory=list)
    num_started: int = 0

    def start(self) -> Replica:
        """Start one more replica that serves at once."""
        replica = self.make()
        self.replicas.append(replica)
        return replica

    def make(self) -> Replica:
        """Return one more replica, which nobody calls yet."""
        name = f"{self.name}-{self.num_started}"
        self.num_started += 1
        return Replica(name, self.build(name))


class Network:
    """All that travels in one world.

    Args:
        loop: Time.
        rng: Draws delays, losses and choices of replicas.
        config: How calls travel.

    Attributes:
        longer_s: Station -> what each way to or from it takes beside the usual, seconds.
    """

    def __init__(self, loop: SimulatedLoop, rng: random.Random, config: WireConfig) -> None:
        self.loop = loop
        self.rng = rng
        self.config = config
        self.calls: list[CallRecord] = []
        self.queued_most = 0
        self.longer_s: dict[str, float] = {}
        self._doubles: set[asyncio.Task[None]] = set()

    async def travel(self, station: str = "") -> None:
        """Wait for as long as one message takes to or from a station."""
        await self.wait_s(self.rng.random() * self.config.delay_s_max + self.longer_s.get(station, 0.0))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something arrive that nobody waits for."""
        task = self.loop.create_task(work, name="again")
        self._doubles.add(task)
        task.add_done_callback(self._doubles.discard)

    async def wait_s(self, duration_s: float) -> None:
        """Wait."""
        future = self.loop.create_future()
        timer = self.loop.call_later(duration_s, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    async def lose(self) -> NoReturn:
        """Wait for what never comes."""
        await self.loop.create_future()
        raise AssertionError("it has come")


class SimulatedCall(LocalCall):
    """A call over the simulated network.

    Args:
        task: Carries it out.
        trip: Told how it ended.
        record: Told whether it is left to try its replica.
    """

    def __init__(self, task: asyncio.Task[Any], trip: Trip, record: CallRecord) -> None:
        super().__init__(task)
        self._trip = trip
        self._record = record

    def cancel(self) -> None:
        """Give the call up."""
        self._trip.given_up(self, super().cancel)
        if self._trip.is_left and self._record.left_s is None:
            self._record.left_s = self._task.get_loop().time()

    @property
    def patience_s(self) -> float:
        """See ``shared.handle.Call``."""
        return self._trip.patience_s


class SimulatedHandle:
    """Calls a station of the simulated mesh.

    Args:
        caller: Ingress replica that has it.
        station: The station.
        network: The way there.
        breakers: Of the station's replicas, in this caller.
    """

    def __init__(self, caller: str, station: Station, network: Network, breakers: Breakers) -> None:
        self._caller = caller
        self._station = station
        self._network = network
        self._breakers = breakers
        self._num_queued = 0

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self._station.name

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> SimulatedCall:
        """Start a method on one live replica; see ``shared.handle.Handle``."""
        if method in TRIES:
            self._breakers.try_silent(lambda name: self._start(method, args, only=name))
        if not needed:
            self._breakers.check([replica.name for replica in self._station.replicas])
        return self._start(method, args)

    def _start(self, method: str, args: tuple[object, ...], only: str | None = None) -> SimulatedCall:
        loop = self._network.loop
        task = asyncio.current_task(loop)
        asker = "" if task is None or only is not None else task.get_name()
        record = CallRecord(self.name, method, asker, loop.time(), caller=self._caller, tries=only or "")
        self._network.calls.append(record)
        trip = Trip(self._breakers, only, may_stay=only is None and method in TRIES)
        return SimulatedCall(loop.create_task(self._run(record, trip, args)), trip, record)

    async def _run(self, record: CallRecord, trip: Trip, args: tuple[object, ...]) -> object:
        network = self._network
        values = [await arg if isinstance(arg, LocalCall) else arg for arg in args]
        await network.travel(self.name)
        replica = await self._find_replica(_key(record, args), trip.only)
        trip.sent_to(replica.name)
        record.replica = replica.name
        work = network.loop.create_task(self._serve(record, replica, values))
        replica.running[work] = None
        work.add_done_callback(lambda done: replica.running.pop(done, None))
        if network.config.doubled_share and network.rng.random() < network.config.doubled_share:
            network.later(self._again(record, replica, values))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._send_cancel(record, replica, work)
            raise
        if work.cancelled():
            if not replica.is_alive:
                await network.wait_s(TOLD_S)
            trip.lost()
            raise StageUnavailableError(f"{replica.name} died under the call", stage=self.name)
        if network.rng.random() < network.config.lost_share:
            await network.lose()
        await network.travel(self.name)
        trip.answered()
        return _result(work)

    async def _find_replica(self, key: str, only: str | None) -> Replica:
        """Return a replica that has room; wait in a bounded queue until there is one.

        It is the first in the key's order of all replicas, or the less busy of two where there is no key.
        """
        network, config = self._network, self._network.config
        if self._num_queued >= config.queued_max:
            raise OverloadedError(
                f"{self._num_queued} calls wait for {self.name}, limit {config.queued_max}",
                stage=self.name, limit=config.queued_max, value=self._num_queued, retry_after_s=1.0,
            )  # fmt: skip
        self._num_queued += 1
        network.queued_most = max(network.queued_most, self._num_queued)
        try:
            while True:
                free = self._free(key, only)
                if free and key:
                    return free[0]
                if free:
                    chosen = network.rng.sample(free, min(2, len(free)))
                    return min(chosen, key=lambda each: len(each.running))
                await network.wait_s(QUEUE_PERIOD_S)
        finally:
            self._num_queued -= 1

    def _free(self, key: str, only: str | None) -> list[Replica]:
        """Return the replicas that may be called and have room, in the order of the key."""
        by_name = {replica.name: replica for replica in self._station.replicas}
        self._breakers.keep(by_name)
        names = sorted(by_name, key=lambda name: zlib.crc32(f"{key}/{name}".encode())) if key else list(by_name)
        usable = self._breakers.usable(names) if only is None else [name for name in names if name == only]
        ongoing_max = self._network.config.ongoing_max
        return [by_name[name] for name in usable if len(by_name[name].running) < ongoing_max]

    async def _again(self, record: CallRecord, replica: Replica, values: list[object]) -> None:
        """Let a call arrive once more, among later ones; nobody waits for it, nor can end it."""
        network = self._network
        second = replace(record, asker="", is_excused=True, tries="")
        network.calls.append(second)
        await network.wait_s(network.rng.random() * 5 * network.config.delay_s_max)
        work = network.loop.create_task(self._serve(second, replica, values))
        replica.running[work] = None
        await asyncio.wait({work})
        replica.running.pop(work, None)
        if not work.cancelled():
            work.exception()  # nobody else asks

    def _send_cancel(self, record: CallRecord, replica: Replica, work: asyncio.Task[Any]) -> None:
        network = self._network
        if network.rng.random() < network.config.lost_cancel_share:
            record.is_excused = True
            return

        def arrive() -> None:
            record.is_excused = record.is_excused or replica.is_silent
            replica.receive(work.cancel)

        network.loop.call_later(network.rng.random() * network.config.delay_s_max, arrive)

    async def _serve(self, record: CallRecord, replica: Replica, values: list[object]) -> object:
        network = self._network
        if not replica.is_alive:
            await network.wait_s(TOLD_S)
            raise StageUnavailableError(f"{replica.name} is gone", stage=self.name)
        if replica.is_silent:
            woken = network.loop.create_future()
            replica.receive(lambda: _wake(woken))
            await woken
        if replica.slow_s:
            await network.wait_s(replica.slow_s)
        if replica.is_failing:
            raise StageUnavailableError(f"{replica.name} fails", stage=self.name)
        record.began_s = network.loop.time()
        try:
            return await getattr(replica.service, record.method)(*values)
        finally:
            record.ended_s = network.loop.time()


def _key(record: CallRecord, args: tuple[object, ...]) -> str:
    """Return what decides on the replica, as ``cluster.affinity`` does: the user, where sequence keeps what is his."""
    if record.station != "sequence" or record.method not in ("encode", "forget"):
        return ""
    return f"user {getattr(args[0], 'user', args[0])}"


def _result(work: asyncio.Task[Any]) -> object:
    error = work.exception()
    if error is None or isinstance(error, RankMeshError):
        return work.result()
    raise StageUnavailableError(f"{type(error).__name__}: {error}") from error


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
