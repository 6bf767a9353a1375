"""A slow look-up is made a second time, after the usual time and within the budget; the first answer counts."""

from __future__ import annotations

import asyncio

import pytest

from services.ingress.config import IngressConfig, StageBudgets
from services.ingress.hedge import HedgeConfig, Hedger
from services.ingress.leg import Leg, all_ended
from shared.clock import ManualClock
from shared.errors import StageUnavailableError
from shared.handle import LocalHandle
from shared.schema.api import RankRequest, RankResponse
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG

HEDGE = HedgeConfig(share_max=0.25, quantile=0.5, calls_min=4, window_calls=16, burst_max=2)
STATION = "embedding:1"


def test_without_a_share_nothing_is_hedged() -> None:
    hedger = Hedger(HedgeConfig(), [STATION])
    for _ in range(1000):
        hedger.ended(STATION, 0.001)
    assert hedger.delay_s(STATION) is None
    assert not hedger.take()


def test_the_delay_is_the_quantile_of_the_newest_calls() -> None:
    hedger = Hedger(HEDGE, [STATION, "embedding:0"])
    for took_s in (0.001, 0.002, 0.003):
        hedger.ended(STATION, took_s)
        assert hedger.delay_s(STATION) is None, "too few calls to say what is usual"
    hedger.ended(STATION, 0.004)
    assert hedger.delay_s(STATION) == 0.003
    assert hedger.delay_s("embedding:0") is None
    assert hedger.delay_s("sequence") is None
    for _ in range(16):
        hedger.ended(STATION, 0.1)
    assert hedger.delay_s(STATION) == 0.1, "old calls are forgotten"


def test_hedges_are_at_most_a_share_of_the_calls() -> None:
    hedger = Hedger(HEDGE, [STATION])
    taken = 0
    for _ in range(1000):
        taken += hedger.take()
        hedger.ended(STATION, 0.001)
    assert 240 <= taken <= 250
    for _ in range(1000):
        hedger.ended(STATION, 0.001)
    assert [hedger.take() for _ in range(3)] == [True, True, False], "no more than the burst is saved up"


class Station:
    async def well(self) -> int:
        return 7

    async def waits(self) -> None:
        await asyncio.Event().wait()


HANDLE = LocalHandle("station", Station())


@pytest.mark.parametrize(("first", "second", "won"), [("waits", "well", True), ("well", "waits", False)])
async def test_the_first_of_two_calls_to_end_is_the_leg(first: str, second: str, won: bool) -> None:
    clock = ManualClock()
    calls = HANDLE.call(first), HANDLE.call(second)
    leg = Leg(STATION, calls[0], clock)
    leg.start_hedge(calls[1])
    await all_ended([leg], clock.monotonic_s() + 1, clock)

    assert leg.ended
    assert leg.hedge_won is won
    assert await leg.call == 7
    loser = calls[0] if won else calls[1]
    assert isinstance(await loser.failure(), StageUnavailableError), "the other one is cancelled"


async def test_cancelling_a_leg_cancels_both_of_its_calls() -> None:
    clock = ManualClock()
    calls = HANDLE.call("waits"), HANDLE.call("waits")
    leg = Leg(STATION, calls[0], clock)
    leg.start_hedge(calls[1])
    await clock.advance(0)
    leg.cancel()
    for call in calls:
        assert isinstance(await call.failure(), StageUnavailableError)


def mesh_of(hedge: HedgeConfig) -> FakeMesh:
    return FakeMesh(IngressConfig(budgets=StageBudgets(embedding_ms=100), hedge=hedge))


async def rank(mesh: FakeMesh, advance_ms: int) -> RankResponse:
    """Rank while the clock moves on millisecond by millisecond."""
    body = RankRequest.model_validate({"user_id": 1, "candidates": [3, 1, 2], "deadline_ms": 1_000})
    task = asyncio.create_task(mesh.ingress.rank(body))
    for step in range(advance_ms + 1):
        for _ in range(10):
            await mesh.manual.advance(0)
        if step < advance_ms:
            await mesh.manual.advance(0.001)
    mesh.ingress.precompute.close()
    assert task.done(), "the answer must be out by now"
    return RankResponse.model_validate(task.result())


@pytest.mark.parametrize(("hedge", "marked"), [(HEDGE, []), (HedgeConfig(), [STATION])])
async def test_a_hanging_replica_is_hedged_and_the_answer_stays_whole(hedge: HedgeConfig, marked: list[str]) -> None:
    mesh = mesh_of(hedge)
    for _ in range(4):
        assert (await rank(mesh, 0)).degraded == []
    mesh.services[STATION].plan("lookup", HANG)
    answer = await rank(mesh, 110)

    assert answer.degraded == marked
    counters = mesh.ingress.counters()
    assert counters.get("hedges.embedding.second", 0) == counters.get(f"hedges.{STATION}", 0) == (not marked)
    assert mesh.services[STATION].started["lookup"] == 5 + (not marked)
    assert mesh.in_flight() == 0, "the hanging call was cancelled"


async def test_a_spent_budget_leaves_the_slow_call_alone() -> None:
    mesh = mesh_of(HEDGE.model_copy(update={"share_max": 0.01}))
    for _ in range(4):
        await rank(mesh, 0)
    mesh.services[STATION].plan("lookup", HANG)
    answer = await rank(mesh, 110)

    assert answer.degraded == [STATION]
    assert mesh.services[STATION].started["lookup"] == 5
