"""Foundation workers on a real mesh: none, some when there is work, none again; answers never notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cases import CaseSource
from benchmarks.chaos.world import hosted_world, world_config
from benchmarks.client import MeshClient
from benchmarks.site import Site
from services.ingress.directory import DeploymentStatus, StatusBody
from shared.clock import SystemClock

pytestmark = pytest.mark.timeout(300)  # the first of them starts a mesh

CLOCK = SystemClock()
NUM_CANDIDATES = 200
SOME = 2
FOUNDATION = {
    "replicas": {
        "replicas": 0,
        "max_ongoing_requests": 4,
        "max_queued_requests": 16,
        "threads": 1,
        "autoscaling": {
            "min_replicas": 0,
            "max_replicas": SOME,
            "busy_target": 0.02,  # a few milliseconds of work ten times a second are more than one worker should have
            "busy_low": 0.01,
            "start_s": 8,
            "window_s": 2,
            "trend_s": 10,
            "down_after_s": 4,
            "down_every_s": 1,
            "zero_after_s": 8,
        },
    }
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("scaling")
    with hosted_world(folder, world_config(folder, "scaling", foundation=FOUNDATION)) as (_, site):
        yield site


async def foundation(client: MeshClient) -> DeploymentStatus:
    status = StatusBody.model_validate(await client.get("/v1/status"))
    return next(each for each in status.deployments if each.name == "foundation")


async def test_none_to_some_to_none(site: Site) -> None:
    source = CaseSource(site.dataset, site.history_length, seed=5)

    async with MeshClient(site.url, 30.0, 8, CLOCK) as client:

        async def work_until(reached: Callable[[DeploymentStatus], bool], limit_s: float, number: int) -> int:
            """Rank for one user after another until the workers are as wanted."""
            until_s = CLOCK.monotonic_s() + limit_s
            while not reached(found := await foundation(client)):
                assert CLOCK.monotonic_s() < until_s, found
                for _ in range(5):
                    case = source.case(number, "long", NUM_CANDIDATES)
                    answer = await client.rank(
                        case.request(None, speculative=True, tier="auto", deadline_ms=5_000, limit=None)
                    )
                    assert answer.body is not None, answer.error
                    number += 1
                    await asyncio.sleep(0.05)
            return number

        async def rest_until_none(limit_s: float) -> None:
            until_s = CLOCK.monotonic_s() + limit_s
            while (found := await foundation(client)).target or found.replicas:
                assert CLOCK.monotonic_s() < until_s, found
                await asyncio.sleep(0.5)

        first = await foundation(client)
        assert (first.target, first.replicas) == (0, [])
        number = await work_until(lambda found: sum(each.state == "ready" for each in found.replicas) == SOME, 120, 0)
        computed = sum(each.counters.get("pairs", 0) for each in (await foundation(client)).replicas)
        assert computed > 0
        await rest_until_none(60)
        await work_until(lambda found: any(each.state == "ready" for each in found.replicas), 60, number)
