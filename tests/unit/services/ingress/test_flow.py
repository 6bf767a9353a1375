"""Every row of the failure table, on fake stations and a clock that moves by hand."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from services.ingress.config import AdmissionConfig, IngressConfig, StageBudgets, TierConfig
from services.ingress.inputs import Inputs
from services.ingress.service import IngressService
from shared.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RankMeshError,
    StageUnavailableError,
    VersionMismatchError,
    WeightsError,
)
from shared.schema.api import RankRequest, RankResponse
from tests.helpers.fake_stations import FakeMesh, FakeRanking
from tests.helpers.faulty import HANG, Fault

GONE = Fault(error=StageUnavailableError("the replica died", stage="x"))
BUDGETS = StageBudgets(preprocess_ms=100, sequence_ms=200, embedding_ms=100, speculative_ms=50, render_ms=2)
CONFIG = IngressConfig(
    budgets=BUDGETS,
    tiers=(
        TierConfig(name="full", cost_ms=120, rank_ms=60, timeout_ms=300),
        TierConfig(name="light", cost_ms=40, rank_ms=20, timeout_ms=300),
    ),
)


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh(CONFIG)


def request(**fields: Any) -> RankRequest:
    return RankRequest.model_validate({"user_id": 1, "candidates": [3, 1, 2], "deadline_ms": 1_000, **fields})


async def rank(mesh: FakeMesh, advance_s: float = 0.0, **fields: Any) -> RankResponse:
    """Rank while the clock moves on, and check that nothing is left running."""
    task = asyncio.create_task(mesh.ingress.rank(request(**fields)))
    await settle(mesh)
    for _ in range(round(advance_s * 1e3)):  # small steps: what a timer wakes may take many turns of the loop
        await mesh.manual.advance(0.001)
        await mesh.manual.advance(0)
    await settle(mesh)
    try:
        assert task.done(), "the answer must be out by now"
        return RankResponse.model_validate(task.result())
    finally:
        mesh.ingress.precompute.close()
        await settle(mesh)
        assert mesh.in_flight() == 0
        assert mesh.ingress.rank_gate.in_flight == 0


async def settle(mesh: FakeMesh) -> None:
    """Let everything that can run without time passing run."""
    for _ in range(10):
        await mesh.manual.advance(0)


async def test_a_whole_answer_has_no_marks_and_calls_each_station_once(mesh: FakeMesh) -> None:
    answer = await rank(mesh)

    assert [row.id for row in answer.candidates] == [3, 2, 1]
    assert (answer.tier, answer.degraded, answer.reasons) == ("full", [], {})
    started = {name: dict(service.started) for name, service in mesh.services.items()}
    assert started["preprocess"] == {"extract": 1}
    assert started["sequence"] == {"encode": 1}
    assert started["embedding:0"] == started["embedding:1"] == {"lookup": 1}
    assert started["ranking:full"] == {"rank": 1}
    assert started["ranking:light"] == {}


@pytest.mark.parametrize(
    ("station", "method"),
    [
        ("preprocess", "extract"),
        ("sequence", "encode"),
        ("embedding:1", "lookup"),
        ("speculative", "lookup"),
        ("ranking:full", "rank"),
    ],
)
async def test_a_replica_that_dies_once_is_retried_and_leaves_no_mark(
    mesh: FakeMesh, station: str, method: str
) -> None:
    mesh.services[station].plan(method, GONE)

    answer = await rank(mesh)

    assert answer.degraded == []
    assert mesh.services[station].started[method] == 2
    assert f"retries.{station.partition(':')[0]}" in mesh.ingress.counters()


@pytest.mark.parametrize(
    ("station", "method"), [("sequence", "encode"), ("embedding:1", "lookup"), ("speculative", "lookup")]
)
async def test_an_optional_station_that_stays_down_is_marked(mesh: FakeMesh, station: str, method: str) -> None:
    mesh.services[station].always(method, GONE)

    answer = await rank(mesh)

    assert answer.degraded == [station]
    assert "the replica died" in answer.reasons[station]
    assert mesh.services[station].started[method] == 2, "retried once, not more"
    assert ranking(mesh).tasks[-1].missing == (station,)


async def test_all_optional_stations_down_still_gives_an_answer(mesh: FakeMesh) -> None:
    for station, method in (
        ("sequence", "encode"),
        ("embedding:0", "lookup"),
        ("embedding:1", "lookup"),
        ("speculative", "lookup"),
    ):
        mesh.services[station].always(method, GONE)

    answer = await rank(mesh)

    assert sorted(answer.degraded) == ["embedding:0", "embedding:1", "sequence", "speculative"]
    assert answer.history_length == 0
    assert len(answer.candidates) == 3


@pytest.mark.parametrize(
    ("station", "method", "limit_ms"),
    [("sequence", "encode", 200), ("embedding:1", "lookup", 100), ("speculative", "lookup", 50)],
)
async def test_an_optional_station_that_hangs_is_given_up_at_its_budget(
    mesh: FakeMesh, station: str, method: str, limit_ms: int
) -> None:
    mesh.services[station].always(method, HANG)

    answer = await rank(mesh, advance_s=0.3)

    assert answer.degraded == [station]
    assert answer.reasons[station] == f"not ready within {limit_ms} ms"
    assert answer.total_ms == pytest.approx(limit_ms, abs=2)
    assert mesh.services[station].cancelled[method] == 1


async def test_a_permanent_error_of_an_optional_station_is_not_retried(mesh: FakeMesh) -> None:
    mesh.services["embedding:0"].always("lookup", Fault(error=WeightsError("broken", version="v1")))

    answer = await rank(mesh)

    assert answer.reasons == {"embedding:0": "weights: broken"}
    assert mesh.services["embedding:0"].started["lookup"] == 1


async def test_preprocess_down_after_its_retry_is_503(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", GONE)

    with pytest.raises(StageUnavailableError):
        await rank(mesh)
    assert mesh.services["preprocess"].started["extract"] == 2


async def test_a_hanging_preprocess_replica_gets_a_competitor(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].plan("extract", HANG)

    answer = await rank(mesh, advance_s=0.2)

    assert answer.degraded == []
    assert answer.total_ms == pytest.approx(100, abs=2)


async def test_preprocess_that_hangs_twice_is_503_within_its_budgets(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", HANG)

    with pytest.raises(StageUnavailableError, match="did not answer within 100 ms, twice"):
        await rank(mesh, advance_s=0.21)


async def test_bad_input_that_preprocess_finds_is_the_clients_error(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", Fault(error=InvalidRequestError("no", field="candidates")))

    with pytest.raises(InvalidRequestError):
        await rank(mesh)
    assert mesh.services["preprocess"].started["extract"] == 1


async def test_ranking_tier_down_goes_to_the_next_lower_one(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].always("rank", GONE)

    answer = await rank(mesh)

    assert (answer.tier, answer.degraded) == ("light", ["ranking:full"])
    assert mesh.services["ranking:full"].started["rank"] == 2
    assert {row.scored_by for row in answer.candidates} == {"first"}


async def test_lowest_tier_down_goes_up_while_there_is_time(mesh: FakeMesh) -> None:
    mesh.services["ranking:light"].always("rank", GONE)

    answer = await rank(mesh, tier="light")

    assert (answer.tier, answer.degraded) == ("full", ["ranking:light"])


async def test_every_tier_down_is_503(mesh: FakeMesh) -> None:
    for tier in ("full", "light"):
        mesh.services[f"ranking:{tier}"].always("rank", GONE)

    with pytest.raises(StageUnavailableError):
        await rank(mesh)


async def test_a_hanging_tier_is_replaced_at_its_time_limit(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].always("rank", HANG)

    answer = await rank(mesh, advance_s=0.4)

    assert (answer.tier, answer.degraded) == ("light", ["ranking:full"])
    assert answer.total_ms == pytest.approx(300, abs=2)
    assert mesh.services["ranking:full"].cancelled["rank"] == 1


async def test_a_slow_tier_near_the_deadline_is_replaced_in_time(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].always("rank", Fault(delay_s=10))

    answer = await rank(mesh, advance_s=0.2, deadline_ms=200)

    assert answer.tier == "light"
    assert answer.degraded == ["deadline", "ranking:full"]
    assert answer.total_ms == pytest.approx(200 - 20 - 2, abs=2)


async def test_a_late_tier_that_still_beats_its_replacement_is_the_answer(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].always("rank", Fault(delay_s=0.31))
    mesh.services["ranking:light"].always("rank", HANG)

    answer = await rank(mesh, advance_s=0.4)

    assert (answer.tier, answer.degraded) == ("full", [])


async def test_inputs_that_are_late_for_the_deadline_are_dropped_and_marked(mesh: FakeMesh) -> None:
    mesh.services["sequence"].always("encode", HANG)

    answer = await rank(mesh, advance_s=0.2, deadline_ms=150)

    assert answer.degraded == ["deadline", "sequence"]
    assert answer.total_ms == pytest.approx(150 - 60 - 2, abs=2)


async def test_a_tier_that_fails_late_keeps_the_inputs_that_are_well(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].plan("rank", Fault(delay_s=0.1, error=StageUnavailableError("died late")))

    answer = await rank(mesh, advance_s=0.15, deadline_ms=150)

    assert (answer.tier, answer.degraded) == ("full", [])
    assert answer.history_length == 7


async def test_no_answer_by_the_deadline_is_504(mesh: FakeMesh) -> None:
    for tier in ("full", "light"):
        mesh.services[f"ranking:{tier}"].always("rank", HANG)

    with pytest.raises(DeadlineExceededError) as caught:
        await rank(mesh, advance_s=0.25, deadline_ms=250)
    assert caught.value.context == {"stage": "ranking", "deadline_ms": 250.0}


async def test_a_needed_stage_that_hangs_past_the_deadline_is_504(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", HANG)

    with pytest.raises(DeadlineExceededError) as caught:
        await rank(mesh, advance_s=0.15, deadline_ms=150)
    assert caught.value.context["stage"] == "preprocess"


async def test_a_request_that_expired_before_it_started_calls_nobody(mesh: FakeMesh) -> None:
    with pytest.raises(DeadlineExceededError):
        await mesh.ingress.rank(request(deadline_ms=50), received_s=mesh.clock.monotonic_s() - 0.05)

    assert all(not service.started for service in mesh.services.values())


async def test_a_generous_request_after_a_tiny_one_is_like_the_one_before(mesh: FakeMesh) -> None:
    before = await rank(mesh, speculative=False)
    mesh.services["preprocess"].plan("extract", HANG)
    with pytest.raises(DeadlineExceededError):
        await rank(mesh, advance_s=0.06, deadline_ms=60)

    after = await rank(mesh, speculative=False)

    assert after.candidates == before.candidates
    assert after.degraded == []


async def test_cancelling_a_request_cancels_every_call_it_holds(mesh: FakeMesh) -> None:
    for station, method in (("sequence", "encode"), ("embedding:0", "lookup"), ("speculative", "lookup")):
        mesh.services[station].always(method, HANG)
    task = asyncio.create_task(mesh.ingress.rank(request()))
    await mesh.manual.advance(0.01)
    assert mesh.in_flight() == 3

    task.cancel()
    await mesh.manual.advance(0)

    assert mesh.in_flight() == 0
    counters = mesh.ingress.counters()
    assert (counters["requests.rank.cancelled"], counters["in_flight_requests.rank"]) == (1, 0)


async def test_200_requests_that_are_dropped_leave_nothing_in_flight(mesh: FakeMesh) -> None:
    start = AdmissionConfig(work_start=1_000)
    crowd = FakeMesh(CONFIG.model_copy(update={"in_flight_max": 200, "admission": start}))
    for station in ("sequence", "embedding:0", "embedding:1"):
        crowd.services[station].always("encode" if station == "sequence" else "lookup", HANG)
    tasks = [asyncio.create_task(crowd.ingress.rank(request())) for _ in range(200)]
    await crowd.manual.advance(0.01)
    assert crowd.in_flight() == 600

    for task in tasks:
        task.cancel()
    await crowd.manual.advance(0)

    assert crowd.in_flight() == 0
    assert crowd.ingress.rank_gate.in_flight == 0


class _Deprived(FakeRanking):
    """A ranking replica that received no user state and no rows of shard 1, though the ingress sent both."""

    async def rank(self, task: Any, features: Any, state: Any, spec: Any, *rows: Any) -> Any:
        return await super().rank(task, features, None, spec, rows[0], None)


async def test_what_got_lost_on_the_way_to_ranking_is_marked_too(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].inner = _Deprived("full")

    answer = await rank(mesh)

    assert answer.degraded == ["sequence", "embedding:1"]


async def test_calls_that_started_are_cancelled_when_another_cannot_even_be_made(mesh: FakeMesh) -> None:
    class Broken:
        name = "speculative"

        def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> Any:
            raise StageUnavailableError("no handle", stage="speculative")

    mesh.services["sequence"].always("encode", HANG)
    stations = dataclasses.replace(mesh.stations, speculative=Broken())
    ingress = IngressService(mesh.config, stations, mesh.ingress.serving.info, mesh.directory, mesh.clock, "ingress-1")

    with pytest.raises(StageUnavailableError, match="no handle"):
        await ingress.rank(request())
    await settle(mesh)

    assert mesh.in_flight() == 0


class _Foreign(FakeRanking):
    """A ranking replica that answers another request."""

    async def rank(self, task: Any, *inputs: Any) -> Any:
        ranked = await super().rank(task, *inputs)
        stamp = ranked.stamp
        wrong = type(stamp)("someone-else/9", stamp.version, stamp.station, stamp.replica, stamp.compute_ms)
        values = {name: getattr(ranked, name) for name in ranked.__dataclass_fields__}
        return type(ranked)(**{**values, "stamp": wrong})


async def test_an_answer_that_belongs_to_another_request_is_never_given(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].inner = _Foreign("full")

    answer = await rank(mesh)

    assert (answer.tier, answer.degraded) == ("light", ["ranking:full"])
    assert "someone-else/9" in answer.reasons["ranking:full"]


async def test_a_station_of_another_version_everywhere_is_an_error_not_an_answer(mesh: FakeMesh) -> None:
    error = VersionMismatchError("holds v0", asked="v1", held="v0")
    mesh.services["preprocess"].always("extract", Fault(error=error))

    with pytest.raises(RankMeshError) as caught:
        await rank(mesh)
    assert caught.value.code == "version_mismatch"


async def test_the_critical_stages_add_up_to_the_total(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", Fault(delay_s=0.010))
    mesh.services["sequence"].always("encode", Fault(delay_s=0.025))
    mesh.services["embedding:1"].always("lookup", Fault(delay_s=0.008))
    mesh.services["ranking:full"].always("rank", Fault(delay_s=0.020))

    answer = await rank(mesh, advance_s=0.1)

    bars = {stage.name: stage for stage in answer.stages}
    critical = [stage for stage in answer.stages if stage.critical]
    assert [stage.name for stage in critical] == ["admission", "preprocess", "gather", "ranking:full", "render"]
    assert sum(stage.duration_ms for stage in critical) == pytest.approx(answer.total_ms, abs=0.01)
    assert answer.total_ms == pytest.approx(45, abs=1)
    assert bars["gather"].duration_ms == pytest.approx(15, abs=1)
    assert bars["embedding:1"].start_ms == pytest.approx(10, abs=1)
    assert bars["embedding:1"].duration_ms == pytest.approx(8, abs=1)
    assert bars["sequence"].duration_ms == pytest.approx(25, abs=1)
    assert bars["sequence"].compute_ms == bars["ranking:full"].compute_ms == 0.5
    assert not bars["sequence"].critical


async def test_a_request_without_speculation_neither_reads_nor_fills_the_cache(mesh: FakeMesh) -> None:
    answer = await rank(mesh, speculative=False)

    assert answer.degraded == []
    assert not mesh.services["speculative"].started
    assert mesh.ingress.precompute.num_started == 0


def ranking(mesh: FakeMesh, tier: str = "full") -> FakeRanking:
    """Return a tier's fake."""
    inner = mesh.services[f"ranking:{tier}"].inner
    assert isinstance(inner, FakeRanking)
    return inner


async def test_stages_of_a_repaired_request_still_add_up(mesh: FakeMesh) -> None:
    mesh.services["preprocess"].plan("extract", GONE, Fault(delay_s=0.010))
    mesh.services["ranking:full"].always("rank", Fault(delay_s=0.020))

    answer = await rank(mesh, advance_s=0.1)

    critical = [stage for stage in answer.stages if stage.critical]
    assert sum(stage.duration_ms for stage in critical) == pytest.approx(answer.total_ms, abs=0.01)
    assert min(stage.duration_ms for stage in critical) >= 0


async def test_an_input_that_breaks_while_a_tier_ranks_twice_is_not_the_tiers_failure(mesh: FakeMesh) -> None:
    """A dying replica can seem well when the inputs are looked at and fail the ranking call twice all the same."""
    mesh.services["ranking:full"].plan("rank", GONE, GONE)
    broken = iter([True, True, False])

    async def repair(inputs: Inputs) -> bool:
        return next(broken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "repair", repair)
        answer = await rank(mesh)

    assert (answer.tier, mesh.services["ranking:full"].started["rank"]) == ("full", 3)
    assert "ranking:full" not in answer.degraded


async def test_time_that_went_into_a_broken_input_is_not_the_tiers(mesh: FakeMesh) -> None:
    """The ranking call ends when its input does, late: what is left of the deadline is the tier's all the same."""
    timeout_s = mesh.ingress.config.tiers[0].timeout_ms / 1e3
    mesh.services["ranking:full"].plan("rank", dataclasses.replace(GONE, delay_s=0.75 * timeout_s))
    broken = iter([True, False])

    async def repair(inputs: Inputs) -> bool:
        await inputs._clock.sleep_s(0.5 * timeout_s)
        return next(broken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "repair", repair)
        answer = await rank(mesh, advance_s=2 * timeout_s)

    assert (answer.tier, answer.degraded) == ("full", [])


async def test_a_tier_that_fails_by_itself_is_asked_twice_at_most(mesh: FakeMesh) -> None:
    mesh.services["ranking:full"].always("rank", GONE)

    answer = await rank(mesh)

    assert (answer.tier, answer.degraded) == ("light", ["ranking:full"])
    assert mesh.services["ranking:full"].started["rank"] == 2
