"""verify against a whole mesh in this process: a right one has no fault, and wrong ones are caught."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.client import MeshClient
from benchmarks.site import Site
from benchmarks.verify import Scope, Verdict, user_events, verify
from cluster.histories import user_loads
from models.random_weights import TINY
from models.source import MemorySource
from services.ingress.config import AdmissionConfig, IngressConfig, StageBudgets, TierConfig
from services.ingress.http import create_app
from shared.clock import SystemClock
from shared.errors import StageUnavailableError
from shared.schema.embeddings import EmbeddingRows
from shared.schema.speculative import PrecomputedBatch
from tests.helpers.faulty import Fault
from tests.helpers.local_mesh import LocalMesh
from tests.helpers.tiny_dataset import tiny_dataset
from tests.helpers.weights import random_weights

SIZES = (20, 40, 60)
# On a busy machine a stage may take longer than a mesh would wait, and the answer would be a marked one, or refused.
PATIENT = IngressConfig(
    budgets=StageBudgets(preprocess_ms=9e3, sequence_ms=9e3, embedding_ms=9e3, speculative_ms=9e3),
    tiers=tuple(TierConfig(name=name, cost_ms=1, rank_ms=1, timeout_ms=9e3) for name in ("full", "light")),
    admission=AdmissionConfig(work_start=1_000, wait_ms_max=30_000, standing_ms_max=30_000),
)


def source() -> MemorySource:
    return random_weights(TINY, num_items=len(tiny_dataset().catalog), num_users=len(tiny_dataset().users))


@asynccontextmanager
async def local_site() -> AsyncIterator[tuple[LocalMesh, Site, MeshClient]]:
    """Yield a mesh in this process with every user's profile and the events before the test period."""
    dataset = tiny_dataset()
    async with LocalMesh.running(source(), config=PATIENT) as mesh:
        await mesh.log.load_many(user_loads(dataset, dataset.split.test_start_s, 4_096))
        transport = httpx.ASGITransport(create_app(mesh.ingress))
        async with MeshClient("http://mesh", 10.0, 16, SystemClock(), transport) as client:
            yield mesh, Site("http://mesh", "unknown", dataset, mesh.source), client


async def run(mesh_site: tuple[LocalMesh, Site, MeshClient], requests: int, speculative: int) -> Verdict:
    _, site, client = mesh_site
    return await verify(site, client, Scope(requests, speculative, 1, SIZES), SystemClock())


async def test_a_right_mesh_has_no_fault_cold_or_warm() -> None:
    async with local_site() as parts:
        verdict = await run(parts, requests=24, speculative=3)
    assert verdict.examples == []
    assert (verdict.requests, verdict.wrong, verdict.degraded) == (24 + 6, 0, 0)
    assert 0 < verdict.max_abs_error < verdict.tolerance
    assert verdict.exact_hits > 0
    assert verdict.document()["wrong"] == 0


def _tampered(rows: EmbeddingRows) -> EmbeddingRows:
    return EmbeddingRows(rows.stamp, rows.shard, {name: part + np.float32(0.01) for name, part in rows.rows.items()})


async def test_a_shard_that_gives_other_rows_is_caught() -> None:
    async with local_site() as parts:
        shard = parts[0].services["embedding:1"].inner
        lookup = shard.lookup

        async def other_rows(*args: Any) -> EmbeddingRows:
            return _tampered(await lookup(*args))

        shard.lookup = other_rows
        verdict = await run(parts, requests=6, speculative=0)
    assert verdict.wrong == 6
    assert "objective" in verdict.examples[0]


async def test_an_embedding_of_another_pair_is_caught() -> None:
    async with local_site() as parts:
        foundation = parts[0].services["foundation"].inner
        precompute = foundation.precompute

        async def mixed_up(*args: Any) -> PrecomputedBatch:
            batch: PrecomputedBatch = await precompute(*args)
            return dataclasses.replace(batch, vectors=batch.vectors[::-1].copy())

        foundation.precompute = mixed_up
        verdict = await run(parts, requests=1, speculative=2)
    assert (verdict.requests, verdict.wrong) == (5, 2)
    assert all("(warm)" in example for example in verdict.examples)


async def test_a_history_that_lacks_the_newest_event_is_caught() -> None:
    async with local_site() as parts:
        log = parts[0].log
        read: Callable[..., Awaitable[Any]] = log.read

        async def stale(user: int, before_s: int, limit: int) -> Any:
            return await read(user, before_s - 30 * 86_400, limit)

        log.read = stale  # type: ignore[assignment]  # a fault in a fake
        verdict = await run(parts, requests=12, speculative=0)
    assert verdict.wrong >= 4


async def test_a_degraded_answer_is_counted_and_not_called_wrong() -> None:
    async with local_site() as parts:
        parts[0].services["embedding:0"].always("lookup", Fault(StageUnavailableError("dead")))
        verdict = await run(parts, requests=4, speculative=0)
    assert (verdict.degraded, verdict.wrong) == (4, 0)


async def test_a_cache_that_serves_nothing_is_a_fault() -> None:
    async with local_site() as parts:
        parts[0].services["embedding:0"].always("lookup", Fault(StageUnavailableError("dead")))
        verdict = await run(parts, requests=1, speculative=2)
    assert (verdict.degraded, verdict.wrong, verdict.exact_hits) == (3, 1, 0)
    assert "full: no answer had the speculative embedding" in verdict.examples[0]


async def test_users_get_exactly_the_events_that_they_lack() -> None:
    dataset = tiny_dataset()
    async with local_site() as (mesh, site, client):
        user_index = int(dataset.split.test.user_index[-1])
        user, now_s = int(dataset.users.user_id[user_index]), int(dataset.split.test.timestamp_s[-1])
        before = await mesh.log.read(user, now_s, 10_000)
        await verify(site, client, Scope(1, 0, 1, SIZES), SystemClock())
        events = user_events(site, user_index, now_s)
        earlier = [event for event in events if event.timestamp_s < dataset.split.test_start_s]
        assert before.num_total == len(earlier) < len(events)
        assert [event.timestamp_s for event in events] == sorted(event.timestamp_s for event in events)


@pytest.mark.parametrize("field", ["requests", "wrong", "degraded", "max_abs_error"])
def test_the_document_has_the_promised_fields(field: str) -> None:
    assert field in Verdict().document()
