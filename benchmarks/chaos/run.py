"""Runs a scenario: mesh, load and faults at the same time; judges every answer once the load is over."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks.ahead import ahead_of_the_mesh
from benchmarks.chaos import memory
from benchmarks.chaos.faults import Fault, Scene, clock_folder, make_fault
from benchmarks.chaos.outcome import Injected, Observed
from benchmarks.chaos.picture import resource_curves, timeline
from benchmarks.chaos.rates import RateRow, measure
from benchmarks.chaos.report import After, Report, make_report
from benchmarks.chaos.resources import Resources
from benchmarks.chaos.scenario import Scenario, load_scenario, mesh_config
from benchmarks.chaos.schedule import Planned, Schedule, make_schedule
from benchmarks.chaos.slopes import slope_documents
from benchmarks.chaos.spaces import Spaces, networked
from benchmarks.chaos.traffic import Seen, WarmTraffic
from benchmarks.chaos.world import hosted_world, load_histories, store_config, with_world
from benchmarks.client import MeshClient
from benchmarks.load import Load
from benchmarks.site import Site
from cluster.config import MeshConfig
from cluster.local import Mesh
from services.ingress.directory import StatusBody
from services.sequence.service import STALE_HISTORY
from shared.clock import Clock, SystemClock
from shared.errors import ConfigError, RankMeshError
from shared.settings import export
from shared.userlog import connect
from shared.weights import WeightStore

CLIENT_TIMEOUT_S = 10.0
"""An answer that takes longer has hung: ten times the usual budget."""

CONNECTIONS_MAX = 64

_POLL_S = 0.5

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hosted:
    """The mesh of a scenario, running.

    Args:
        folder: Of the scenario; reports go beside it.
        mesh: The mesh.
        site: The same, for the oracle.
        config: Its configuration, with the address of its store.
        spaces: Namespaces of its nodes, where they have any.
    """

    folder: Path
    mesh: Mesh
    site: Site
    config: MeshConfig
    spaces: Spaces | None


@contextmanager
def hosted(scenario: Scenario, var_dir: Path, tell: Tell) -> Iterator[Hosted]:
    """Run the mesh of a scenario, in a folder that is emptied first; end it afterwards.

    Raises:
        ConfigError: its deployment breaks a rule, the same scenario runs now, or this machine lacks what a fault needs.
        RankMeshError: the mesh does not start.
    """
    folder = (var_dir / "chaos" / scenario.name).absolute()
    config = mesh_config(scenario)
    if Mesh.find(config.name, folder) is not None:
        raise ConfigError(f"scenario {scenario.name} runs already in {folder}", field="name", value=scenario.name)
    Mesh.end(config.name, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if any(fault.kind == "clock" for fault in scenario.faults):
        clock_folder(folder).mkdir()
        export({"RANKMESH_CLOCK_SKEW_DIR": str(clock_folder(folder))})
    if any(fault.kind == "memory" for fault in scenario.faults):
        memory.check_allowed()
    apart = scenario.network == "namespaces"
    with (
        networked(config) if apart else nullcontext((config, None)) as (config, spaces),
        hosted_world(folder, with_world(folder, config), lambda doing: tell(f"mesh: {doing}")) as (mesh, site),
    ):
        yield Hosted(folder, mesh, site, with_store(config, mesh), spaces)


def measure_rates(path: Path, rates: Sequence[float], seconds: float, var_dir: Path, tell: Tell) -> list[RateRow]:
    """Find how many requests a second the mesh of a scenario bears while nothing is broken.

    Args:
        path: The file.
        rates: Requests a second.
        seconds: At each.
        var_dir: Folder of run-time files.
        tell: Told in a few words what is being done.

    Raises:
        RankMeshError: see ``hosted``.
    """
    scenario = load_scenario(path)

    async def run(site: Site) -> list[RateRow]:
        clock = SystemClock()
        async with MeshClient(site.url, CLIENT_TIMEOUT_S, CONNECTIONS_MAX, clock) as client:
            traffic = WarmTraffic(
                site, client, clock, deadline_ms=scenario.load.deadline_ms, num_candidates=scenario.load.candidates
            )
            tell("warming the caches")
            await traffic.warm()
            with ahead_of_the_mesh():
                return await measure(traffic, rates, seconds)

    with hosted(scenario, var_dir, tell) as its:
        return asyncio.run(run(its.site))


@dataclass(frozen=True, slots=True)
class Instead:
    """What is to be otherwise than a scenario file says.

    Args:
        duration_s: Length of the load, None: as it says.
        requests_per_s: Arrivals, None: as it says.
    """

    duration_s: float | None = None
    requests_per_s: float | None = None

    def fields(self) -> dict[str, float]:
        """Return them by dotted name."""
        named = {"duration_s": self.duration_s, "load.requests_per_s": self.requests_per_s}
        return {name: value for name, value in named.items() if value is not None}

    def options(self) -> str:
        """Return them as options of the command line, each after a space."""
        named = {"--seconds": self.duration_s, "--per-s": self.requests_per_s}
        return "".join(f" {name} {value:g}" for name, value in named.items() if value is not None)


def run_file(path: Path, seed: int, var_dir: Path, tell: Tell, instead: Instead | None = None) -> Report:
    """Run a scenario file in a mesh of its own; report, picture and answers go to ``<var_dir>/chaos/``.

    Args:
        path: The file.
        seed: Of the schedule.
        var_dir: Folder of run-time files.
        tell: Told in a few words what is being done.
        instead: What is to be otherwise than the file says.

    Raises:
        ConfigError: the scenario or its deployment breaks a rule, or the same scenario runs now.
        RankMeshError: the mesh does not start.
    """
    instead = instead or Instead()
    scenario = load_scenario(path, instead.fields())
    schedule = make_schedule(scenario, seed)
    command = f"rankmesh chaos run {shlex.quote(str(path))} --seed {seed}{instead.options()}"
    figure = (var_dir / "chaos" / f"{scenario.name}-seed{seed}.svg").absolute()
    with hosted(scenario, var_dir, tell) as its:
        runner = Runner(scenario, schedule, its.mesh, its.site, its.config, SystemClock(), tell)
        runner.spaces = its.spaces
        runner.samples_file = figure.with_suffix(".resources.jsonl")
        observed, faults, after = asyncio.run(runner.run())
    report = make_report(scenario, seed, schedule, observed, faults, after, command)
    figure.write_text(timeline(report, observed), encoding="utf-8")
    report.figures.append(str(figure))
    if runner.resources is not None:
        report.slopes = slope_documents(runner.resources.slopes())
        curves = figure.with_suffix(".resources.svg")
        curves.write_text(resource_curves(runner.resources.series, report), encoding="utf-8")
        report.figures.append(str(curves))
    figure.with_suffix(".json").write_bytes(orjson.dumps(report.document()) + b"\n")
    figure.with_suffix(".jsonl").write_bytes(b"".join(orjson.dumps(asdict(each)) + b"\n" for each in observed))
    return report


def with_store(config: MeshConfig, mesh: Mesh) -> MeshConfig:
    """Return a configuration that reaches the store of a running mesh."""
    return config.model_copy(update={"store": config.store.model_copy(update={"client": store_config(mesh, config)})})


class Runner:
    """One run over one mesh.

    Args:
        scenario: What to run.
        schedule: Its faults.
        mesh: The mesh.
        site: The same, for the oracle.
        config: Its configuration, with the address of its store.
        clock: Time.
        tell: Told what is being done.

    Attributes:
        samples_file: Where samples of resources go; None: none are taken.
        resources: What was sampled, where the scenario asks for it.
        spaces: Namespaces of the mesh's nodes, where they have any.
    """

    def __init__(
        self,
        scenario: Scenario,
        schedule: Schedule,
        mesh: Mesh,
        site: Site,
        config: MeshConfig,
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._scenario = scenario
        self._schedule = schedule
        self._mesh = mesh
        self._site = site
        self._config = config
        self._clock = clock
        self._tell = tell
        self.samples_file: Path | None = None
        self.resources: Resources | None = None
        self.spaces: Spaces | None = None

    async def run(self) -> tuple[list[Observed], list[Injected], After]:
        """Warm the mesh, run load and faults, wait until it is whole again, and judge the answers."""
        plan = self._scenario.load
        async with MeshClient(self._site.url, CLIENT_TIMEOUT_S, CONNECTIONS_MAX, self._clock) as client:
            traffic = WarmTraffic(
                self._site, client, self._clock, deadline_ms=plan.deadline_ms, num_candidates=plan.candidates
            )
            self._tell("warming the caches")
            await traffic.warm()
            await self._whole(client, traffic)
            before = len(self._mesh.processes())
            store = connect(self._config.store.client)
            try:
                with ahead_of_the_mesh():
                    began_s = self._clock.monotonic_s()
                    async with self._sampled(store, began_s):
                        load, faults = await asyncio.gather(
                            traffic.watched_load(plan.requests_per_s, self._schedule.duration_s),
                            self._break(traffic, store, began_s),
                        )
            finally:
                await store.aclose()
            self._tell("waiting until every replica is back")
            whole = await self._whole(client, traffic)
            after = After(whole, before, len(self._mesh.processes()))
            self._tell("judging the answers")
            return _judge(traffic, load), faults, after

    @asynccontextmanager
    async def _sampled(self, store: Any, began_s: float) -> AsyncIterator[None]:
        """Sample the resources of the mesh meanwhile, where the scenario asks for it."""
        if self._scenario.resources is None or self.samples_file is None:
            yield
            return
        with self.samples_file.open("wb") as file:
            self.resources = Resources(self._mesh, store, self._scenario.resources, self._clock, file)
            watch = asyncio.create_task(self.resources.watch(began_s))
            try:
                yield
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _break(self, traffic: WarmTraffic, store: Any, began_s: float) -> list[Injected]:
        """Put every fault in at its time, and take it back at its own; returns them by time."""
        scene = Scene(self._mesh, store, WeightStore(str(self._site_weights())), self._refill(traffic), self._clock)
        scene.spaces = self.spaces
        scene.forget = lambda: setattr(traffic, "history_known", False)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(scene, each, began_s)) for each in self._schedule.faults]
        return sorted((task.result() for task in tasks), key=lambda each: each.at_s)

    def _site_weights(self) -> Path:
        return self._mesh.folders.root.parent / "weights"

    def _refill(self, traffic: WarmTraffic) -> Callable[[], asyncio.Future[None]]:
        async def refill() -> None:
            await load_histories(self._mesh, self._config)
            await traffic.send_events()

        return lambda: asyncio.ensure_future(refill())

    async def _one(self, scene: Scene, planned: Planned, began_s: float) -> Injected:
        await self._clock.sleep_s(planned.at_s - (self._clock.monotonic_s() - began_s))
        fault: Fault = make_fault(scene, planned)
        what, healed_s, error = "", None, ""
        at_s = self._clock.monotonic_s() - began_s
        try:
            what = await fault.inject()
            at_s = self._clock.monotonic_s() - began_s
            self._tell(f"{at_s:6.1f} s  {planned.label}: {what}")
            if planned.plan.kind != "kill":
                await self._clock.sleep_s(planned.plan.hold_s)
        except (RankMeshError, OSError) as problem:
            error = str(problem)
        finally:
            try:
                what = ", ".join(filter(None, (what, await fault.heal())))
                healed_s = None if planned.plan.kind == "kill" else self._clock.monotonic_s() - began_s
            except (RankMeshError, httpx.HTTPError, OSError) as problem:
                error = f"{error} not healed: {problem}".strip()
        return Injected(planned, at_s, what, healed_s, error)

    async def _whole(self, client: MeshClient, traffic: WarmTraffic) -> bool:
        """Wait until every replica is ready and a second of answers is whole; returns whether that came in time."""
        end_s = self._clock.monotonic_s() + self._scenario.recovery_max_s
        while self._clock.monotonic_s() < end_s:
            if await self._replicas_ready(client):
                load = await traffic.load(self._scenario.load.requests_per_s, max(1.0, _one_request_s(self._scenario)))
                if all(each.answer is not None and each.answer.answer.outcome == "ok" for each in load.samples):
                    return True
            await self._clock.sleep_s(_POLL_S)
        return False

    async def _replicas_ready(self, client: MeshClient) -> bool:
        try:
            status = StatusBody.model_validate(await client.get("/v1/status"))
        except httpx.HTTPError:
            return False
        return status.store.healthy and all(
            sum(replica.state == "ready" and replica.version is not None for replica in each.replicas) == each.target
            for each in status.deployments
        )


def _one_request_s(scenario: Scenario) -> float:
    return 1.0 / scenario.load.requests_per_s + 1e-6


def _judge(traffic: WarmTraffic, load: Load[Seen]) -> list[Observed]:
    observed = []
    for sample in sorted(load.samples, key=lambda each: each.due_s):
        if sample.answer is None:
            observed.append(Observed(sample.due_s, sample.latency_ms, "not_sent", detail="too many in flight"))
            continue
        seen = sample.answer
        observed.append(
            Observed(
                sample.due_s,
                sample.latency_ms,
                seen.outcome,
                seen.reasons,
                traffic.verdict(seen),
                seen.by_form or dict(seen.reasons).get("sequence") == STALE_HISTORY,
                seen.detail,
                sample.late_ms,
                seen.total_ms,
            )
        )
    return observed
