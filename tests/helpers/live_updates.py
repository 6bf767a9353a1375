"""A real mesh whose weights change, with traffic of which every answer is judged by the state that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import httpx

from benchmarks.cases import HISTORY_KINDS, Case, CaseSource
from benchmarks.chaos.world import hosted_world, world_config, world_dataset
from benchmarks.client import Answer, MeshClient
from benchmarks.judge import Judge
from benchmarks.load import open_loop
from benchmarks.site import Site
from benchmarks.verify import send_events
from benchmarks.weights.drift import Drift, States
from cluster.desk import RolloutRequest
from cluster.local import Mesh
from cluster.rollout import UpdatesConfig
from models.config import RankerConfig
from models.golden import add_golden
from services.ingress.directory import RolloutBody, StatusBody
from shared.clock import SystemClock
from shared.schema.api import RankRequest
from shared.weights import WeightStore
from shared.weights.deltas import parse_stamp
from tests.helpers.updated_mesh import publish_source
from tests.helpers.weights import random_weights
from training.publish import golden_request

Sent: TypeAlias = list[tuple[Case, RankRequest, Answer]]

CLOCK = SystemClock()
NUM_CANDIDATES = 40
NUM_USERS = 24
RATE_PER_S = 10
PERIOD_S = 0.25


class LiveUpdates:
    """The mesh, its store, and the oracle of every state."""

    def __init__(self, mesh: Mesh, site: Site, folder: Path) -> None:
        self.mesh = mesh
        self.site = site
        self.store = WeightStore(folder / "weights")
        self.states = States(self.store)
        self.golden = golden_request(world_dataset(), site.history_length)
        source = CaseSource(site.dataset, site.history_length, seed=11)
        kinds = HISTORY_KINDS
        drawn = (source.case(number, kinds[number % len(kinds)], NUM_CANDIDATES) for number in range(4 * NUM_USERS))
        self.cases = list({case.user: case for case in drawn}.values())[:NUM_USERS]
        asyncio.run(self._send_events())

    async def _send_events(self) -> None:
        async with MeshClient(self.site.url, 30.0, 4, CLOCK) as client:
            await send_events(client, self.site, self.cases)

    def status(self) -> StatusBody:
        body = httpx.get(f"{self.site.url}/v1/status", timeout=30.0, trust_env=False).raise_for_status().content
        return StatusBody.model_validate_json(body)

    def ask(self, action: Literal["rollout", "rollback"], version: str = "", **fields: float) -> str:
        """Ask the mesh's owner for a roll-out; returns the id by which status knows it."""
        request = RolloutRequest(id=f"{action}-{version}", action=action, version=version, **fields)
        request.write(self.mesh.folders.root)
        return request.id

    async def until(self, request_id: str, *phases: str) -> RolloutBody:
        """Wait until a roll-out is in one of some phases."""
        for _ in range(600):
            found = (await asyncio.to_thread(self.status)).rollout
            if found.id == request_id and found.phase in phases:
                return found
            await CLOCK.sleep_s(0.1)
        raise AssertionError(f"{request_id} does not come to {phases}: {found}")

    def publish(self, version: str, seed: int) -> Path:
        """Publish random weights of the world's form; returns their folder."""
        dataset = world_dataset()
        config = RankerConfig.model_validate(self.site.source.json("model"))
        source = random_weights(config, len(dataset.catalog), len(dataset.users), seed=seed, version=version)
        add_golden(source, self.golden)
        publish_source(self.store, source)
        return Path(self.store.root) / version

    def drift(self, base: str, seed: int = 1) -> Drift:
        return Drift(self.store, base, self.golden, seed)

    async def traffic(self, duration_s: float) -> Sent:
        async with MeshClient(self.site.url, 30.0, 32, CLOCK) as client:

            async def send(index: int) -> tuple[Case, RankRequest, Answer]:
                case = self.cases[index % len(self.cases)]
                request = case.request(None, speculative=False, tier="auto", deadline_ms=10_000, limit=NUM_CANDIDATES)
                return case, request, await client.rank(request)

            load = await open_loop(send, RATE_PER_S, duration_s, 64, CLOCK)
        return [sample.answer for sample in load.samples if sample.answer is not None]

    def faults(self, sent: Sent) -> list[str]:
        """Judge each answer by the oracle of the state that it names."""
        faults: list[str] = []
        stamps = sorted({each.body.weights_version for *_, each in sent if each.body is not None}, key=parse_stamp)
        for stamp in stamps:
            judge = Judge(self.states.source(stamp), self.site.default_limit, self.site.num_shards)
            for case, request, answer in sent:
                if answer.body is not None and answer.body.weights_version == stamp:
                    judgement = judge.judge(case.name, case, request, answer)
                    faults += [f"{stamp} {case.name}: {fault}" for fault in judgement.faults]
        return faults + [
            f"{case.name}: {answer.outcome} {answer.detail}" for case, _, answer in sent if answer.body is None
        ]


@contextmanager
def live_updates(folder: Path, name: str) -> Iterator[LiveUpdates]:
    """Start a mesh of the default deployment, but with quick rounds, and end it."""
    config = world_config(folder, name, updates=UpdatesConfig(period_s=PERIOD_S, busy_share=1.0))
    with hosted_world(folder, config) as (mesh, site):
        yield LiveUpdates(mesh, site, folder)
