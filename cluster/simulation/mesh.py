"""One simulated mesh: ingress replicas over simulated stations, its faults, its roll-out, and what came of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.rollout import Rollouts
from cluster.simulation import stations
from cluster.simulation.loop import LoopExecutor, SimulatedLoop, StuckError, run_simulated
from cluster.simulation.network import CallRecord, Network, Replica, SimulatedHandle, Station
from cluster.simulation.owner import UPDATES, SimulatedControl, SimulatedDesk, Taken
from cluster.simulation.stores import SimulatedStore, SimulatedUserLog
from cluster.simulation.world import (
    END_S,
    FIRST,
    NUM_INGRESS,
    NUM_SHARDS,
    STATIONS,
    TIERS,
    USERS,
    Append,
    Ask,
    Fault,
    Forget,
    World,
)
from models.config import RankerConfig
from services.ingress.config import IngressConfig, PrecomputeConfig, StageBudgets, TierConfig
from services.ingress.directory import DeploymentStatus, StoreStatus
from services.ingress.hedge import HedgeConfig
from services.ingress.job import Stations
from services.ingress.model_info import ModelInfo
from services.ingress.routing import BudgetRouter
from services.ingress.service import IngressService
from services.ingress.serving import FrontModel, ServingOrder
from shared.breaker import BreakerConfig, Breakers
from shared.clock import LoopClock
from shared.errors import RankMeshError
from shared.schema.api import Event, EventsRequest, RankRequest
from shared.userlog import UserLoad

EPOCH_S = 1_000_000.0
SKEW_S_MAX = 0.5
TAKE_OUT_S = 0.05
"""Until the others know that a replica is dead."""

SETTLE_S = 2.0
"""After the last request and fault; then nothing may be left of them."""

CONFIG = IngressConfig(
    tiers=tuple(TierConfig(name=name, cost_ms=cost, rank_ms=rank, timeout_ms=150)
                for name, cost, rank in zip(TIERS, (60, 25), (35, 12), strict=True)),
    budgets=StageBudgets(
        preprocess_ms=60, sequence_ms=100, embedding_ms=60, speculative_ms=50, render_ms=1, events_ms=300
    ),
    num_shards=NUM_SHARDS,
    in_flight_max=6,
    light_above_in_flight=4,
    precompute=PrecomputeConfig(settle_s=0.3, in_flight_max=2, timeout_ms=150),
    hedge=HedgeConfig(share_max=0.2, calls_min=4, window_calls=16, delay_ms_min=5.0),
    breaker=BreakerConfig(failures=3, silent_ms=20, apart_ms=5, open_ms=100),
)  # fmt: skip
MODEL = RankerConfig()


@dataclass(slots=True)
class Outcome:
    """What became of one request.

    Args:
        ask: The request.
        ended_s: When it had its answer; None: it has none, or its client went away.
        body: The answer.
        error: Or why there is none.
        is_gone: Its client went away first.
    """

    ask: Ask
    ended_s: float | None = None
    body: dict[str, Any] | None = None
    error: BaseException | None = None
    is_gone: bool = False


@dataclass(slots=True)
class Peaks:
    """The most of each bounded thing that was seen at once."""

    in_flight: int = 0
    precompute: int = 0
    held_work: int = 0
    queued: int = 0


@dataclass(slots=True)
class Report:
    """What came of a world.

    Args:
        world: The world.
        config: Of its ingress.
        outcomes: Of its requests, and of one after all faults were over.
        probe: The last one.
        calls: All calls that were made.
        peaks: Of the bounded things.
        taken: The orders that ingress replicas took, by time.
        ended: The order at the end.
        held: Replica -> the states that it holds then.
        forgetting_s: User -> when a deletion began.
        forgotten_s: User -> when it was acknowledged.
        acknowledged: Events that a client was told are kept.
        stored: Events in the log at the end.
        lost_buffers: Whether a replica of sequence ended, whose buffer may go with it.
        left: What still ran at the end, by name.
        error: A failure of the simulation itself, such as a loop that never ends.
    """

    world: World
    config: IngressConfig = CONFIG
    outcomes: list[Outcome] = field(default_factory=list)
    probe: Outcome | None = None
    calls: list[CallRecord] = field(default_factory=list)
    peaks: Peaks = field(default_factory=Peaks)
    taken: list[Taken] = field(default_factory=list)
    ended: ServingOrder = field(default_factory=lambda: ServingOrder.first(FIRST))
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    forgetting_s: dict[int, float] = field(default_factory=dict)
    forgotten_s: dict[int, float] = field(default_factory=dict)
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    stored: dict[int, int] = field(default_factory=dict)
    lost_buffers: bool = False
    left: dict[str, int] = field(default_factory=dict)
    error: str = ""


class _Directory:
    async def deployments(self) -> list[DeploymentStatus]:
        return []

    async def store(self) -> StoreStatus:
        return StoreStatus(kind="embedded", url="redis://simulated", healthy=True)


class SimulatedMesh:
    """The mesh of one world.

    Args:
        world: What happens.
        loop: Time.
        config: Of the ingress.
    """

    def __init__(self, world: World, loop: SimulatedLoop, config: IngressConfig = CONFIG) -> None:
        self.world = world
        self.config = config
        self.loop = loop
        self.report = Report(world, config)
        self._rng = random.Random(world.seed * 7 + 1)
        self.network = Network(loop, self._rng, world.wire)
        self.report.calls = self.network.calls
        self.store = SimulatedStore(self.network)
        self.clocks: dict[str, LoopClock] = {}
        self.control: SimulatedControl | None = None
        self.stations = {name: Station(name, self._builder(name)) for name in STATIONS}
        for station in self.stations.values():
            for _ in range(world.num_replicas):
                station.start()
        self.ingresses = [self._ingress(f"ingress-{number}") for number in range(NUM_INGRESS)]
        self.control = SimulatedControl(self.stations, self.ingresses, self.network, world.deaf_share)
        self.report.taken = self.control.taken
        desk = SimulatedDesk(world, loop.time)
        self.rollouts = Rollouts(desk, FIRST, self.control, UPDATES, self._clock("owner"), stations.QUIET)

    # --- building -------------------------------------------------------------------------------------------------

    def _clock(self, replica: str) -> LoopClock:
        clock = LoopClock(self.loop, EPOCH_S, self._rng.uniform(-SKEW_S_MAX, SKEW_S_MAX))
        self.clocks[replica] = clock
        return clock

    def _builder(self, name: str) -> Any:
        kind, _, which = name.partition(":")

        def executor() -> LoopExecutor:
            return LoopExecutor(self.loop, lambda: self._rng.random() * self.world.work_s)

        def build(replica: str) -> Any:
            clock, weights = self._clock(replica), self._weights(name)
            if kind == "preprocess":
                return stations.PreprocessStation(replica, clock, weights)
            if kind == "embedding":
                return stations.embedding(int(which), NUM_SHARDS, replica, clock, weights)
            if kind == "sequence":
                return stations.sequence(SimulatedUserLog(self.store), replica, clock, weights, executor())
            if kind == "speculative":
                return stations.speculative(self.store.hashes, replica, clock, weights)
            if kind == "foundation":
                return stations.FoundationStation(replica, clock, weights, executor())
            return stations.RankingStation(which, replica, clock, weights, executor())

        return build

    def _weights(self, station: str) -> stations.Weights:
        rollout = self.world.rollout
        opening = LoopExecutor(self.loop, lambda: self._rng.random() * self.world.load_s)
        flaw = ("", "") if rollout is None else (rollout.flaw, rollout.station)
        return stations.Weights(station, self._order, opening, flaw)

    def _order(self) -> ServingOrder:
        return ServingOrder.first(FIRST) if self.control is None else self.control.order

    def _ingress(self, replica: str) -> IngressService:
        clock = self._clock(replica)
        config = self.config
        breakers = {name: Breakers(name, config.breaker, clock, config.limit_ms(name) / 1e3) for name in self.stations}
        handles = {
            name: SimulatedHandle(replica, station, self.network, breakers[name])
            for name, station in self.stations.items()
        }
        reached = Stations(
            preprocess=handles["preprocess"],
            sequence=handles["sequence"],
            embedding=tuple(handles[f"embedding:{shard}"] for shard in range(NUM_SHARDS)),
            speculative=handles["speculative"],
            ranking={tier: handles[f"ranking:{tier}"] for tier in TIERS},
            foundation=handles["foundation"],
            breakers=breakers,
        )
        router = BudgetRouter(config.tiers, config.light_above_in_flight)

        def open_model(base: str) -> FrontModel:
            return FrontModel(ModelInfo(base, MODEL, {}, None), router)

        model = ModelInfo(FIRST, MODEL, {}, None)
        return IngressService(config, reached, model, _Directory(), clock, replica, router, stations.QUIET, open_model)

    # --- what happens ---------------------------------------------------------------------------------------------

    async def run(self) -> Report:
        """Let it all happen, wait until it has settled, and look at what is left."""
        await self._load()
        start = [self._spawn(f"fault {number}", self._fail(each)) for number, each in enumerate(self.world.faults)]
        start += [self._spawn(f"append {number}", self._append(each)) for number, each in enumerate(self.world.appends)]
        start += [self._spawn(f"forget {number}", self._forget(each)) for number, each in enumerate(self.world.forgets)]
        asks = [self._spawn(f"ask {number}", self._ask(each)) for number, each in enumerate(self.world.asks)]
        if self.world.rollout is not None or self.world.deltas_s:
            start.append(self._spawn("rollouts", self.rollouts.run()))
        longest_s = max((ask.at_s + ask.deadline_ms / 1e3 for ask in self.world.asks), default=0.0)
        heal_s = max([END_S, *(fault.at_s + fault.duration_s for fault in self.world.faults)])
        await self.network.wait_s(max(longest_s, heal_s) + SETTLE_S)
        self.report.left = self._left(asks)
        await self._probe()
        self.report.ended = self.rollouts.order
        self.report.held = {
            replica.name: replica.service.versions.report().held
            for station in self.stations.values()
            for replica in station.replicas
        }
        for task in (*start, *asks):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.report.error = self.report.error or f"{task.get_name()}: {type(error).__name__}: {error}"
        self.report.peaks.queued = self.network.queued_most
        self.report.stored = {user: len(self.store.log._logs.get(f"i{user}", ())) for user in range(1_000, 1_003)}
        return self.report

    def _spawn(self, name: str, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work, name=name)

    async def _load(self) -> None:
        for user in range(USERS):
            times = np.arange(user, dtype=np.int64) + 10
            items = np.arange(user, dtype=np.int64)
            await self.store.log.load_many([UserLoad(user, items, np.ones(user, np.float32), times, items)])

    async def _ask(self, ask: Ask) -> None:
        await self.network.wait_s(ask.at_s)
        outcome = Outcome(ask)
        self.report.outcomes.append(outcome)
        await self._answer(ask, outcome)

    async def _answer(self, ask: Ask, outcome: Outcome) -> None:
        task = asyncio.current_task(self.loop)
        if ask.patience_s is not None and task is not None:
            self.loop.call_later(ask.patience_s, task.cancel)
        request = RankRequest(
            user_id=ask.user, candidates=list(ask.candidates), deadline_ms=ask.deadline_ms, limit=len(ask.candidates)
        )
        ingress = self.ingresses[ask.ingress]
        self._look(ingress)
        try:
            outcome.body = await ingress.rank(request)
        except asyncio.CancelledError:
            outcome.is_gone = True
        except RankMeshError as error:
            outcome.error = error
        outcome.ended_s = self.loop.time()
        self._look(ingress)

    def _look(self, ingress: IngressService) -> None:
        self.loop.call_soon(self._note_peaks, ingress)
        self._note_peaks(ingress)

    def _note_peaks(self, ingress: IngressService) -> None:
        peaks = self.report.peaks
        peaks.in_flight = max(peaks.in_flight, ingress.rank_gate.in_flight)
        peaks.precompute = max(peaks.precompute, ingress.precompute.in_flight)
        for name in ("ranking:full", "ranking:light"):
            for replica in self.stations[name].replicas:
                peaks.held_work = max(peaks.held_work, replica.service.worker.num_held)

    async def _append(self, append: Append) -> None:
        await self.network.wait_s(append.at_s)
        event = Event(
            event_id=f"e{append.event}", user_id=append.user, item_id=1, weight=1.0, timestamp_s=100 + append.event
        )
        try:
            result = await self.ingresses[append.ingress].append(EventsRequest(events=[event]))
        except RankMeshError:
            return
        if result["appended"] or result["buffered"]:
            self.report.acknowledged.add((append.user, append.event))

    async def _forget(self, forget: Forget) -> None:
        await self.network.wait_s(forget.at_s)
        self.report.forgetting_s[forget.user] = self.loop.time()
        try:
            await self.ingresses[forget.ingress].forget(forget.user)
        except RankMeshError:
            return
        self.report.forgotten_s[forget.user] = self.loop.time()

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _fail(self, fault: Fault) -> None:
        await self.network.wait_s(fault.at_s)
        if fault.kind == "store_down":
            self.store.is_down = True
        elif fault.kind == "store_silent":
            self.store.is_silent = True
        elif fault.kind == "store_slow":
            self.store.slow_s = fault.slow_s
        elif fault.kind == "far":
            self.network.longer_s[fault.station] = fault.slow_s
            await self.network.wait_s(fault.duration_s)
            self.network.longer_s.pop(fault.station, None)
            return
        elif fault.kind == "clock":
            await self._jump(fault)
            return
        else:
            await self._fail_replica(fault)
            return
        await self.network.wait_s(fault.duration_s)
        self.store.is_down = self.store.is_silent = False
        self.store.slow_s = 0.0

    async def _jump(self, fault: Fault) -> None:
        names = [name for name in self.clocks if name.startswith(fault.station)]
        clock = self.clocks[names[fault.replica % len(names)]]
        clock.jump(fault.skew_s)
        await self.network.wait_s(fault.duration_s)
        clock.jump(-fault.skew_s)

    async def _fail_replica(self, fault: Fault) -> None:
        station = self.stations[fault.station]
        if not station.replicas:
            return
        if fault.kind == "failing":
            failing = list(station.replicas)
            for each in failing:
                each.is_failing = True
            await self.network.wait_s(fault.duration_s)
            for each in failing:
                each.is_failing = False
            return
        replica = station.replicas[fault.replica % len(station.replicas)]
        if fault.kind == "kill":
            self.report.lost_buffers |= fault.station == "sequence"
            replica.kill()
            self.loop.call_later(TAKE_OUT_S, self._take_out, station, replica)
            await self.network.wait_s(fault.duration_s)
            await self._start(station)
        elif fault.kind == "silent":
            replica.fall_silent()
            await self.network.wait_s(fault.duration_s)
            replica.wake()
        else:
            replica.slow_s = fault.slow_s
            await self.network.wait_s(fault.duration_s)
            replica.slow_s = 0.0

    async def _start(self, station: Station) -> None:
        """Start a replica, which reads its weights first; what is to be held may have changed when it has."""
        replica = station.make()
        await self.network.wait_s(self._rng.random() * self.world.load_s)
        self._weights(station.name).start(replica.service.versions)
        station.replicas.append(replica)

    def _take_out(self, station: Station, replica: Replica) -> None:
        if replica in station.replicas:
            station.replicas.remove(replica)

    # --- the end --------------------------------------------------------------------------------------------------

    def _left(self, asks: list[asyncio.Task[Any]]) -> dict[str, int]:
        """Return what is still there of requests that are over."""
        found = {"requests without an answer": sum(not task.done() for task in asks)}
        for ingress in self.ingresses:
            found[f"places taken at {ingress.replica}"] = ingress.rank_gate.in_flight
            found[f"precomputations of {ingress.replica}"] = ingress.precompute.in_flight
            found[f"versions in use at {ingress.replica}"] = len(ingress.serving._in_flight)
            found[f"work held at admission of {ingress.replica}"] = round(ingress.rank_gate.capacity.in_flight_work)
        for name, station in self.stations.items():
            found[f"calls in {name}"] = sum(len(replica.running) for replica in station.replicas)
        return {what: number for what, number in found.items() if number}

    async def _probe(self) -> None:
        """Ask once more, now that nothing is wrong."""
        self.network.config = type(self.network.config)(self.world.wire.delay_s_max)
        ask = Ask(self.loop.time(), 0, 1, (1, 2, 3), 1_000)
        self.report.probe = Outcome(ask)
        task = self._spawn("probe", self._answer(ask, self.report.probe))
        await asyncio.wait({task})
        self.report.outcomes.append(self.report.probe)


def simulate(world: World, config: IngressConfig = CONFIG) -> Report:
    """Run a world.

    A failure of the simulation itself is in the report's ``error``.

    Args:
        world: What happens.
        config: Of the ingress.
    """
    reports: list[Report] = []

    async def main(loop: SimulatedLoop) -> Report:
        mesh = SimulatedMesh(world, loop, config)
        reports.append(mesh.report)
        return await mesh.run()

    try:
        return run_simulated(main)
    except StuckError as error:
        report = reports[0] if reports else Report(world, config)
        report.error = f"{type(error).__name__}: {error}"
        return report
