from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.ingress.config import IngressConfig, TierConfig
from services.ingress.directory import StatusBody
from services.ingress.service import IngressService
from services.ingress.serving import ServingOrder
from shared.errors import ConfigError
from shared.schema.api import RankRequest
from shared.schema.user import EncodeTask, UserState
from tests.helpers.fake_stations import FakeMesh


async def test_request_time_defaults_to_now_and_ids_are_canonical_on_the_way_in() -> None:
    mesh = FakeMesh()
    seen: list[EncodeTask] = []
    inner = mesh.services["sequence"].inner
    encode = inner.encode

    async def spy(task: EncodeTask) -> UserState:
        seen.append(task)
        state: UserState = await encode(task)
        return state

    inner.encode = spy
    answer = await mesh.ingress.rank(RankRequest(user_id="42", candidates=["7", 8]))

    assert (seen[0].user, seen[0].as_of_s) == (42, int(mesh.clock.now_s()))
    assert (answer["user_id"], [row["id"] for row in answer["candidates"]]) == ("42", [8, "7"])


async def test_request_ids_are_made_by_the_ingress_and_never_repeat() -> None:
    mesh = FakeMesh()
    answers = [await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1])) for _ in range(3)]
    echoed = await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1], request_id="mine"))

    assert len({answer["request_id"] for answer in answers}) == 3
    assert echoed["request_id"] == "mine"
    tasks = mesh.services["ranking:full"].inner.tasks
    assert len({task.request_id for task in tasks}) == 4, "a client's id is never what tells requests apart"
    mesh.ingress.precompute.close()


class BrokenHandle:
    """A station whose handle fails as such."""

    name = "speculative"

    def call(self, method: str, *args: object, payload_bytes: int | None = None, needed: bool = False) -> Any:
        raise RuntimeError("the router has been shut down")


async def test_a_call_that_cannot_even_be_made_leaves_nothing_held() -> None:
    mesh = FakeMesh()
    stations = replace(mesh.stations, speculative=BrokenHandle())
    info = mesh.ingress.serving.info
    ingress = IngressService(mesh.config, stations, info, mesh.directory, mesh.clock, "ingress-1")
    with pytest.raises(RuntimeError):
        await ingress.rank(RankRequest(user_id=1, candidates=[1]))
    await mesh.manual.advance(0)
    taken = await ingress.serving.take(ServingOrder.first("v1"))
    assert (taken["in_flight"], ingress.rank_gate.in_flight, mesh.in_flight()) == ([], 0, 0)


@pytest.mark.parametrize(("limit", "count"), [(None, 3), (2, 2), (3, 3), (9, 3)])
async def test_the_answer_is_as_long_as_asked_and_possible(limit: int | None, count: int) -> None:
    mesh = FakeMesh()
    answer = await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1, 2, 3], limit=limit))

    assert (len(answer["candidates"]), answer["num_candidates"]) == (count, 3)
    mesh.ingress.precompute.close()


async def test_status_tells_the_whole_mesh() -> None:
    mesh = FakeMesh(IngressConfig(mesh="two"))
    mesh.directory.down = {"embedding:1"}
    status = StatusBody.model_validate_json((await mesh.ingress.mesh_status()).model_dump_json())

    assert (status.name, status.ready, status.version) == ("two", True, "v1")
    states = {each.name: each.replicas[0].state for each in status.deployments}
    assert states["embedding:1"] == "down"
    assert len(states) == 9


def test_tiers_without_a_station_are_a_configuration_error() -> None:
    mesh = FakeMesh()
    config = IngressConfig(tiers=(TierConfig(name="huge", cost_ms=1, rank_ms=1, timeout_ms=1),))
    with pytest.raises(ConfigError, match="huge"):
        IngressService(config, mesh.stations, mesh.ingress.serving.info, mesh.directory, mesh.clock, "ingress-0")


async def test_a_request_leaves_one_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = FakeMesh()
    await mesh.ingress.rank(RankRequest(user_id=1, candidates=[1, 2], request_id="r", speculative=False))

    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["client_request_id"], line["tier"], line["degraded"]) == ("ranked", "r", "full", [])
