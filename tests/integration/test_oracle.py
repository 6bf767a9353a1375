"""The mesh and the oracle agree: a part of what ``rankmesh verify`` checks, on the same code."""

from __future__ import annotations

from benchmarks.client import MeshClient
from benchmarks.site import Site
from benchmarks.verify import Scope, verify
from shared.clock import SystemClock

NUM_REQUESTS = 30
NUM_SPECULATIVE = 3


async def test_real_requests_get_the_oracles_answers_cold_and_warm(site: Site) -> None:
    clock = SystemClock()
    async with MeshClient(site.url, 30.0, 16, clock) as client:
        verdict = await verify(site, client, Scope(NUM_REQUESTS, NUM_SPECULATIVE, seed=5), clock)
    assert verdict.examples == []
    assert (verdict.wrong, verdict.degraded) == (0, 0)
    assert verdict.requests == NUM_REQUESTS + 2 * NUM_SPECULATIVE
    assert 0 < verdict.max_abs_error <= verdict.tolerance
    assert verdict.exact_hits > 0
    assert verdict.user_hits > 0
