"""Scaling on a real mesh: foundation workers from none to some to none, a tier up and down; no answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from benchmarks.cases import CaseSource
from benchmarks.chaos.world import hosted_world, world_config
from benchmarks.client import MeshClient
from benchmarks.site import Site
from services.ingress.directory import StatusBody
from shared.clock import SystemClock

pytestmark = pytest.mark.timeout(300)  # the first of them starts a mesh

CLOCK = SystemClock()
NUM_CANDIDATES = 200
SOME = 2
SCALING = {
    "max_replicas": SOME,
    "busy_target": 0.02,  # a few milliseconds of work ten times a second are more than one replica should have
    "busy_low": 0.01,
    "start_s": 8,
    "window_s": 2,
    "trend_s": 10,
    "down_after_s": 4,
    "down_every_s": 1,
    "zero_after_s": 8,
}
CALLS = {"max_ongoing_requests": 4, "max_queued_requests": 64, "threads": 1}
FOUNDATION = {"replicas": {"replicas": 0, **CALLS, "autoscaling": {"min_replicas": 0, **SCALING}}}
RANKING = {"full": {"replicas": {"replicas": 1, **CALLS, "autoscaling": SCALING}}, "light": {}}

Ready: TypeAlias = dict[str, int]
"""Station -> replicas that are ready."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("scaling")
    sections: dict[str, Any] = {"foundation": FOUNDATION, "ranking": RANKING}
    with hosted_world(folder, world_config(folder, "scaling", **sections)) as (_, site):
        yield site


class Load:
    """A client that ranks for one user after another."""

    def __init__(self, client: MeshClient, site: Site) -> None:
        self._client = client
        self._cases = CaseSource(site.dataset, site.history_length, seed=5)
        self._number = 0

    async def ready(self) -> Ready:
        status = StatusBody.model_validate(await self._client.get("/v1/status"))
        return {each.name: sum(one.state == "ready" for one in each.replicas) for each in status.deployments}

    async def counted(self, station: str, counter: str) -> int:
        status = StatusBody.model_validate(await self._client.get("/v1/status"))
        replicas = next(each.replicas for each in status.deployments if each.name == station)
        return sum(replica.counters.get(counter, 0) for replica in replicas)

    async def rank_until(self, reached: Callable[[Ready], bool], limit_s: float) -> None:
        until_s = CLOCK.monotonic_s() + limit_s
        while not reached(ready := await self.ready()):
            assert CLOCK.monotonic_s() < until_s, ready
            for _ in range(5):
                case = self._cases.case(self._number, "long", NUM_CANDIDATES)
                answer = await self._client.rank(
                    case.request(None, speculative=True, tier="full", deadline_ms=5_000, limit=None)
                )
                assert answer.body is not None, answer.error
                self._number += 1
                await asyncio.sleep(0.05)

    async def rest_until(self, reached: Callable[[Ready], bool], limit_s: float) -> None:
        until_s = CLOCK.monotonic_s() + limit_s
        while not reached(ready := await self.ready()):
            assert CLOCK.monotonic_s() < until_s, ready
            await asyncio.sleep(0.5)


async def test_none_to_some_to_none(site: Site) -> None:
    async with MeshClient(site.url, 30.0, 8, CLOCK) as client:
        load = Load(client, site)
        first = await load.ready()
        assert (first["foundation"], first["ranking:full"]) == (0, 1)
        await load.rank_until(lambda ready: ready["foundation"] == ready["ranking:full"] == SOME, 150)
        assert await load.counted("foundation", "pairs") > 0
        await load.rest_until(lambda ready: (ready["foundation"], ready["ranking:full"]) == (0, 1), 60)
        await load.rank_until(lambda ready: ready["foundation"] > 0, 60)
