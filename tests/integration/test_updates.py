"""Weights change under load: every answer is that of the version that it names, and none is lost over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from benchmarks.cases import HISTORY_KINDS, Case, CaseSource
from benchmarks.chaos.world import hosted_world, world_config, world_dataset
from benchmarks.client import Answer, MeshClient
from benchmarks.judge import Judge
from benchmarks.load import open_loop
from benchmarks.site import Site
from benchmarks.verify import send_events
from benchmarks.weights.drift import Drift, States
from cluster.local import Mesh
from cluster.rollout import RolloutRequest, UpdatesConfig
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

pytestmark = pytest.mark.timeout(240)  # the first of them starts a mesh

CLOCK = SystemClock()
NUM_CANDIDATES = 40
NUM_USERS = 24
RATE_PER_S = 10
PERIOD_S = 0.25


class Updated:
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

    async def traffic(self, duration_s: float) -> list[tuple[Case, RankRequest, Answer]]:
        async with MeshClient(self.site.url, 30.0, 32, CLOCK) as client:

            async def send(index: int) -> tuple[Case, RankRequest, Answer]:
                case = self.cases[index % len(self.cases)]
                request = case.request(None, speculative=False, tier="auto", deadline_ms=10_000, limit=NUM_CANDIDATES)
                return case, request, await client.rank(request)

            load = await open_loop(send, RATE_PER_S, duration_s, 64, CLOCK)
        return [sample.answer for sample in load.samples if sample.answer is not None]

    def faults(self, sent: list[tuple[Case, RankRequest, Answer]]) -> list[str]:
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


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updated]:
    folder = tmp_path_factory.mktemp("updates")
    config = world_config(folder, "updates", updates=UpdatesConfig(period_s=PERIOD_S, busy_share=1.0))
    with hosted_world(folder, config) as (mesh, site):
        yield Updated(mesh, site, folder)


async def test_answers_under_updates_are_those_of_the_version_they_name(updated: Updated) -> None:
    base = parse_stamp(updated.status().version)[0]
    drift = updated.drift(base)
    deltas = [drift.network() if number % 8 == 5 else drift.rows(100) for number in range(24)]

    async def train() -> None:
        for delta in deltas:
            await asyncio.to_thread(drift.append, delta)
            await CLOCK.sleep_s(0.15)

    sent, _ = await asyncio.gather(updated.traffic(5.0), train())
    assert updated.faults(sent) == []
    assert {answer.outcome for *_, answer in sent} == {"ok"}
    served = {answer.body.weights_version for *_, answer in sent if answer.body is not None}
    assert len(served) > 4
    assert parse_stamp(updated.status().version) == (base, deltas[-1].sequence)


async def test_a_version_goes_out_behind_a_canary_and_back(updated: Updated) -> None:
    before = updated.status().version
    updated.publish("20270101-000000-00000002", seed=2)
    traffic = asyncio.create_task(updated.traffic(7.0))
    asked = updated.ask("rollout", "20270101-000000-00000002", share=0.5, watch_s=3)
    assert (await updated.until(asked, "canary", "refused")).phase == "canary"
    served = await updated.until(asked, "served", "rolled_back", "refused")
    assert (served.phase, served.previous, served.reason) == ("served", before, "")
    sent = await traffic
    assert updated.faults(sent) == []
    assert {answer.outcome for *_, answer in sent} == {"ok"}
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {before, "20270101-000000-00000002"}
    back = await updated.until(updated.ask("rollback"), "rolled_back", "refused")
    assert back.phase == "rolled_back"
    assert updated.status().version == before
    assert updated.faults(await updated.traffic(1.0)) == []


async def test_damage_is_refused_with_its_reason_and_the_old_version_serves(updated: Updated) -> None:
    before = updated.status().version
    folder = updated.publish("20270101-000000-00000003", seed=3)
    path = folder / "dense.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 4]) + data[-19:])
    refused = await updated.until(updated.ask("rollout", folder.name, share=0.1), "refused", "canary")
    assert refused.phase == "refused"
    assert "dense.safetensors has SHA-256" in refused.reason
    sent = await updated.traffic(1.0)
    assert updated.faults(sent) == []
    assert {answer.body.weights_version for *_, answer in sent if answer.body} == {before}
