"""Stations whose replicas have fallen silent: marked at once, never waited for as if the mesh were slow."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from services.ingress.config import IngressConfig
from services.ingress.service import IngressService
from shared.breaker import Breakers, Trip
from shared.clock import ManualClock
from shared.handle import TRIES, LocalCall, LocalHandle
from shared.schema.api import EventsRequest, RankRequest
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG


class WatchedCall(LocalCall):
    """A call to the only replica of its station."""

    def __init__(self, task: asyncio.Task[Any], trip: Trip) -> None:
        super().__init__(task)
        self._trip = trip
        trip.sent_to("replica-0")
        task.add_done_callback(lambda done: None if done.cancelled() else trip.answered())

    @property
    def patience_s(self) -> float:
        return self._trip.patience_s

    def cancel(self) -> None:
        self._trip.given_up(self, super().cancel)


class WatchedHandle(LocalHandle):
    """Calls a service in this process as if it were one replica, with a breaker."""

    def __init__(self, name: str, service: Any, breakers: Breakers) -> None:
        super().__init__(name, service)
        self.breakers = breakers
        self.calls: list[tuple[str, bool]] = []

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> WatchedCall:
        start = super().call
        if method in TRIES:
            self.breakers.try_silent(lambda name: WatchedCall(start(method, *args)._task, Trip(self.breakers, name)))
        if not needed:
            self.breakers.check(["replica-0"])
        self.calls.append((method, needed))
        return WatchedCall(start(method, *args)._task, Trip(self.breakers, may_stay=method in TRIES))


class HandClock(ManualClock):
    """A clock that a test can set too."""

    def set(self, time_s: float) -> None:
        self._time_s = time_s


class WatchedMesh(FakeMesh):
    """A mesh whose calls have breakers."""

    clock: HandClock

    def __init__(self, config: IngressConfig | None = None) -> None:
        super().__init__(config, HandClock())
        self.breakers = {
            name: Breakers(name, self.config.breaker, self.clock, self.config.limit_ms(name) / 1e3)
            for name in self.services
        }
        self.handles = {
            name: WatchedHandle(name, service, self.breakers[name]) for name, service in self.services.items()
        }
        self.stations = type(self.stations)(
            preprocess=self.handles["preprocess"],
            sequence=self.handles["sequence"],
            embedding=tuple(self.handles[f"embedding:{shard}"] for shard in range(self.config.num_shards)),
            speculative=self.handles["speculative"],
            ranking={tier.name: self.handles[f"ranking:{tier.name}"] for tier in self.config.tiers},
            foundation=self.handles["foundation"],
            breakers=self.breakers,
        )
        info = self.ingress.serving.info
        self.ingress = IngressService(self.config, self.stations, info, self.directory, self.clock, "ingress-0")

    def silence(self, *names: str) -> None:
        """Let stations hang, of which it is known already that they do."""
        for name in names:
            self.services[name].always(METHODS[name.partition(":")[0]], HANG)
            self.breakers[name].sent("replica-0")
        for _ in range(self.config.breaker.failures):
            sent_s = self.clock.monotonic_s()
            self.clock.set(sent_s + max(self.config.limit_ms(name) for name in names) / 1e3)  # nobody sleeps yet
            for name in names:
                self.breakers[name].given_up("replica-0", sent_s)
        assert [self.breakers[name].open for name in names] == [["replica-0"]] * len(names)

    def heal(self, *names: str) -> None:
        """Let stations answer, which nobody knows yet."""
        for name in names:
            self.services[name].always(METHODS[name.partition(":")[0]], None)


METHODS = {
    "preprocess": "extract",
    "sequence": "encode",
    "embedding": "lookup",
    "speculative": "lookup",
    "ranking": "rank",
    "foundation": "precompute",
}


def request(**fields: Any) -> RankRequest:
    return RankRequest(user_id=7, candidates=[5, 3, 9], **fields)


async def at_once(mesh: FakeMesh, **fields: Any) -> dict[str, Any]:
    """Return an answer for which no time passes."""
    answering = asyncio.ensure_future(mesh.ingress.rank(request(**fields)))
    await mesh.manual.advance(0.0)
    await mesh.manual.advance(0.0)
    assert answering.done(), "it waits"
    return answering.result()


@pytest.fixture
def mesh() -> WatchedMesh:
    return WatchedMesh(IngressConfig.model_validate({"precompute": {"enabled": False}}))


OPTIONAL = ["sequence", "embedding:1", "speculative"]


@pytest.mark.parametrize("silent", [*([name] for name in OPTIONAL), OPTIONAL])
async def test_without_a_silent_station_answers_are_marked_at_once(mesh: WatchedMesh, silent: list[str]) -> None:
    mesh.silence(*silent)
    answer = await at_once(mesh)
    assert sorted(answer["degraded"]) == sorted(silent)
    assert all(answer["reasons"][name].startswith("stage_silent: ") for name in silent)
    assert [row["id"] for row in answer["candidates"]] == [9, 5, 3]
    counters = mesh.ingress.counters()
    assert not any(name.startswith("retries") for name in counters), "what is refused is not repeated"
    assert {name: counters[f"refused_calls.{name}"] for name in silent} == dict.fromkeys(silent, 1)


async def test_a_silent_tier_is_passed_over_at_once(mesh: WatchedMesh) -> None:
    mesh.silence("ranking:full")
    answer = await at_once(mesh)
    assert (answer["tier"], answer["degraded"]) == ("light", ["ranking:full"])
    assert answer["reasons"]["ranking:full"].startswith("stage_silent: ")


async def test_what_nothing_can_replace_is_called_all_the_same(mesh: WatchedMesh) -> None:
    mesh.silence("preprocess", "ranking:full", "ranking:light")
    mesh.heal("preprocess", "ranking:light")
    answer = await at_once(mesh)
    assert answer["tier"] == "light"
    assert mesh.handles["preprocess"].calls == [("extract", True)]
    assert mesh.handles["ranking:full"].calls == []
    assert mesh.handles["ranking:light"].calls == [("rank", True)]


async def test_events_and_deletions_are_not_refused(mesh: WatchedMesh) -> None:
    event = {"event_id": "e1", "user_id": 7, "item_id": 1, "weight": 1.0, "timestamp_s": 5}
    mesh.silence("sequence")
    assert (await mesh.ingress.append(EventsRequest.model_validate({"events": [event]})))["appended"] == 1
    mesh.silence("sequence", "speculative")
    assert (await mesh.ingress.forget(7))["deleted"]


async def test_a_station_is_used_again_once_a_copy_of_a_call_was_answered(mesh: WatchedMesh) -> None:
    mesh.silence("embedding:0")
    assert (await at_once(mesh))["degraded"] == ["embedding:0"]
    mesh.heal("embedding:0")
    await mesh.manual.advance(mesh.config.breaker.open_ms / 1e3)
    assert (await at_once(mesh))["degraded"] == ["embedding:0"], "nobody waits for the copy"
    assert (await at_once(mesh))["degraded"] == []
    assert mesh.ingress.counters()["breakers_opened.embedding:0"] == 1


async def test_a_station_that_hangs_is_waited_for_a_few_times_and_then_marked_at_once(mesh: WatchedMesh) -> None:
    mesh.services["sequence"].always("encode", HANG)
    waits_s: list[float] = []
    for _ in range(6):
        answering, began_s = asyncio.ensure_future(mesh.ingress.rank(request())), mesh.clock.monotonic_s()
        while not answering.done():
            await mesh.manual.advance(0.01)
        assert answering.result()["degraded"] == ["sequence"]
        waits_s.append(mesh.clock.monotonic_s() - began_s)
    assert [wait_s > 0.4 for wait_s in waits_s] == [True, True, True, False, False, False]


async def test_features_are_asked_of_another_replica_as_soon_as_waiting_is_in_vain(mesh: WatchedMesh) -> None:
    for _ in range(8):
        await at_once(mesh)
    mesh.services["preprocess"].plan("extract", HANG)
    answering, began_s = asyncio.ensure_future(mesh.ingress.rank(request(deadline_ms=300))), mesh.clock.monotonic_s()
    while not answering.done():
        await mesh.manual.advance(0.005)
    assert answering.result()["degraded"] == []
    assert 0.1 <= mesh.clock.monotonic_s() - began_s < 0.15
    assert mesh.ingress.counters()["retries.preprocess"] == 1


async def test_status_and_metrics_tell_who_is_left_out(mesh: WatchedMesh) -> None:
    mesh.silence("embedding:0", "ranking:full")
    await at_once(mesh)
    assert (await mesh.ingress.mesh_status()).silent == {
        "embedding:0": ["replica-0"],
        "ranking:full": ["replica-0"],
    }
    counters = mesh.ingress.counters()
    assert counters["breakers_opened.embedding:0"] == 1
    for _ in range(2):  # reading them twice counts nothing twice
        text = mesh.ingress.metrics().decode()
        assert 'rankmesh_ingress_breakers_opened_total{station="ranking"} 1.0' in text
        assert 'rankmesh_ingress_breakers_closed_total{station="ranking"} 0.0' in text
        assert 'rankmesh_ingress_refused_calls_total{station="embedding"} 1.0' in text


async def test_work_after_the_answer_is_let_go() -> None:
    mesh = WatchedMesh(IngressConfig.model_validate({"precompute": {"settle_s": 0}}))
    mesh.silence("foundation")
    assert (await at_once(mesh))["degraded"] == []
    await mesh.ingress.precompute.drain()
    assert (mesh.ingress.precompute.num_started, mesh.ingress.precompute.num_failed) == (1, 1)


async def test_a_request_that_waits_in_vain_is_not_at_work(mesh: WatchedMesh) -> None:
    for _ in range(8):
        await at_once(mesh)
    gate = mesh.ingress.rank_gate
    mesh.services["embedding:1"].always("lookup", HANG)
    answering = asyncio.ensure_future(mesh.ingress.rank(request()))
    seen: list[tuple[int, int]] = []
    while not answering.done():
        await mesh.manual.advance(0.01)
        seen.append((gate.in_flight, gate.num_working))
    assert seen[:9] == [(1, 1)] * 9, "it may come yet"
    assert seen[13:39] == [(1, 0)] * 26
    assert answering.result()["degraded"] == ["embedding:1"]
    assert (gate.in_flight, gate.num_working, gate.capacity.in_flight_work) == (0, 0, 0.0)


async def test_a_request_whose_replica_answers_others_is_at_work(mesh: WatchedMesh) -> None:
    for _ in range(8):
        await at_once(mesh)
    mesh.services["embedding:1"].always("lookup", HANG)
    answering = asyncio.ensure_future(mesh.ingress.rank(request()))
    for _ in range(30):
        await mesh.manual.advance(0.01)
        trip = Trip(mesh.breakers["embedding:1"])
        trip.sent_to("replica-0")
        trip.answered()
        assert mesh.ingress.rank_gate.num_working == 1
    answering.cancel()
    await asyncio.wait([answering])
    await mesh.manual.advance(0.1)
    assert mesh.ingress.rank_gate.num_working == 0


def test_every_station_has_a_limit() -> None:
    config = IngressConfig()
    for name in FakeMesh().services:
        assert config.limit_ms(name) < math.inf, name
    assert config.limit_ms("ranking:light") == 500
    assert config.limit_ms("embedding:17") == 400
