from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from services.ingress.config import AdmissionConfig, IngressConfig, PrecomputeConfig
from services.ingress.serving import ServingOrder
from shared.clock import ManualClock
from shared.errors import StageUnavailableError
from shared.log import JsonLogger
from shared.schema.api import RankRequest
from tests.helpers.fake_stations import VERSION, FakeMesh, FakeSpeculative
from tests.helpers.faulty import HANG, Fault

CONFIG = IngressConfig(precompute=PrecomputeConfig(in_flight_max=2, candidates_max=3, timeout_ms=100))
QUIET = JsonLogger(stream=io.StringIO())
GONE = Fault(error=StageUnavailableError("gone"))


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh(CONFIG)


async def rank(mesh: FakeMesh, **fields: Any) -> dict[str, Any]:
    return await mesh.ingress.rank(RankRequest.model_validate({"user_id": 1, "candidates": [1, 2, 3, 4], **fields}))


def stored(mesh: FakeMesh) -> set[Any]:
    inner = mesh.services["speculative"].inner
    assert isinstance(inner, FakeSpeculative)
    return set(inner.stored)


async def test_the_head_is_precomputed_after_the_answer(mesh: FakeMesh) -> None:
    await rank(mesh)
    assert not mesh.services["foundation"].started, "not before the answer is out"
    assert mesh.ingress.precompute.in_flight == 1

    await mesh.ingress.precompute.drain()

    assert stored(mesh) == {(1, 4), (1, 3)}, "what the full pass scored, and nothing else"
    counters = mesh.ingress.counters()
    assert (counters["precompute_started"], counters["precompute_stored"]) == (1, 2)


async def test_exact_hits_are_not_computed_again(mesh: FakeMesh) -> None:
    await rank(mesh)
    await mesh.ingress.precompute.drain()

    await rank(mesh)
    await mesh.ingress.precompute.drain()

    assert mesh.services["foundation"].started["precompute"] == 1


async def test_a_state_that_has_just_come_neither_reads_nor_fills_the_cache() -> None:
    clock = ManualClock()
    mesh = FakeMesh(IngressConfig(precompute=PrecomputeConfig(settle_s=10)), clock)
    await rank(mesh)
    await mesh.ingress.precompute.drain()
    assert {row["speculative"] for row in (await rank(mesh))["candidates"]} == {"none", "exact"}
    await mesh.ingress.precompute.drain()
    await mesh.ingress.serving.take(ServingOrder(version=f"{VERSION}+1"))
    reads, fills = (dict(mesh.services[name].started) for name in ("speculative", "foundation"))
    await clock.advance(9.9)
    body = await rank(mesh, user_id=2)
    assert ({row["speculative"] for row in body["candidates"]}, body["degraded"]) == ({"none"}, [])
    assert [dict(mesh.services[name].started) for name in ("speculative", "foundation")] == [reads, fills]
    assert mesh.ingress.precompute.in_flight == 0
    await clock.advance(0.1)
    await rank(mesh, user_id=2)
    assert mesh.services["speculative"].started["lookup"] == reads["lookup"] + 1
    assert mesh.ingress.precompute.in_flight == 1
    mesh.ingress.precompute.close()


async def test_the_number_of_pairs_is_bounded(mesh: FakeMesh) -> None:
    await rank(mesh, candidates=list(range(1, 21)))
    await mesh.ingress.precompute.drain()

    assert stored(mesh) == {(1, 20), (1, 19), (1, 18)}


async def test_what_does_not_fit_in_flight_is_dropped_and_counted(mesh: FakeMesh) -> None:
    mesh.services["foundation"].always("precompute", HANG)
    for user in range(3):
        await rank(mesh, user_id=user)

    assert mesh.ingress.precompute.in_flight == 2
    assert mesh.ingress.counters()["precompute_dropped"] == 1
    await mesh.manual.advance(0.1)

    assert mesh.ingress.precompute.in_flight == 0
    assert mesh.in_flight() == 0
    assert mesh.ingress.counters()["precompute_failed"] == 2


async def test_a_failing_foundation_worker_is_counted_and_hurts_nobody(mesh: FakeMesh) -> None:
    mesh.services["foundation"].always("precompute", GONE)
    await rank(mesh)
    await mesh.ingress.precompute.drain()

    assert (await rank(mesh))["degraded"] == []
    assert mesh.ingress.counters()["precompute_failed"] == 1
    mesh.ingress.precompute.close()


@pytest.mark.parametrize(("station", "method"), [("sequence", "encode"), ("embedding:0", "lookup")])
async def test_answers_from_broken_inputs_are_not_followed_up(mesh: FakeMesh, station: str, method: str) -> None:
    mesh.services[station].always(method, GONE)

    await rank(mesh)

    assert mesh.ingress.counters()["precompute_started"] == 0


@pytest.mark.parametrize("fields", [{"speculative": False}, {"tier": "light"}])
async def test_nothing_is_precomputed_when_there_is_nothing_to_gain(mesh: FakeMesh, fields: dict[str, Any]) -> None:
    await rank(mesh, **fields)
    assert mesh.ingress.counters()["precompute_started"] == 0


async def test_it_can_be_switched_off() -> None:
    mesh = FakeMesh(IngressConfig(precompute=PrecomputeConfig(enabled=False)))
    await rank(mesh)
    assert mesh.ingress.counters()["precompute_started"] == 0


async def test_closing_the_ingress_ends_it(mesh: FakeMesh) -> None:
    mesh.services["foundation"].always("precompute", HANG)
    await rank(mesh)
    await mesh.manual.advance(0)

    await mesh.ingress.aclose()
    await mesh.manual.advance(0)

    assert mesh.ingress.precompute.in_flight == 0
    assert mesh.in_flight() == 0


async def test_200_requests_for_one_missing_pair_compute_it_once_and_are_all_answered() -> None:
    mesh = FakeMesh(IngressConfig(in_flight_max=300, admission=AdmissionConfig(work_start=1_000)), logger=QUIET)
    mesh.services["foundation"].always("precompute", HANG)
    answers = await asyncio.gather(*(rank(mesh, candidates=[1], tier="full") for _ in range(200)))
    await mesh.manual.advance(0.01)

    assert all(answer["degraded"] == [] for answer in answers)
    assert {answer["candidates"][0]["speculative"] for answer in answers} == {"none"}
    assert mesh.services["foundation"].started["precompute"] == 1
    assert mesh.ingress.counters()["precompute_dropped"] == 199
    mesh.ingress.precompute.close()
