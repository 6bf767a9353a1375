"""Forgetting a user over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from services.ingress.routing import BudgetRouter
from shared.clock import SystemClock
from shared.errors import StoreUnavailableError
from shared.hashing import EntityId
from shared.schema.api import ErrorBody, Event, ForgetResponse, RankRequest
from shared.schema.ranking import RankedList, RankTask
from shared.schema.user import EncodeTask, UserState
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import Fault, FaultyService


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh(IngressConfig(), SystemClock())


async def delete(mesh: FakeMesh, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(mesh.ingress), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        response = await client.delete(f"/v1/users/{path}/events")
    await mesh.ingress.aclose()
    return response


@pytest.mark.parametrize(("user", "path"), [(42, "42"), ("a/b c", "a%2Fb%20c"), ("\u00fc", "%C3%BC")])
async def test_a_user_is_forgotten_once(mesh: FakeMesh, user: int | str, path: str) -> None:
    events = [
        Event(event_id="e1", user_id=one, item_id=7, weight=4.5, timestamp_s=100) for one in (user, "someone else")
    ]
    await mesh.services["sequence"].inner.append(events)
    first = await delete(mesh, path)
    assert first.status_code == 200
    assert ForgetResponse.model_validate_json(first.content).deleted
    assert [event.user_id for event in mesh.services["sequence"].inner.appended] == ["someone else"]
    assert not ForgetResponse.model_validate_json((await delete(mesh, path)).content).deleted


async def test_a_bad_user_id_names_the_field(mesh: FakeMesh) -> None:
    response = await delete(mesh, "x" * 300)
    assert response.status_code == 422
    assert ErrorBody.model_validate_json(response.content).context["field"] == "user_id"


@pytest.mark.parametrize("path", ["%FF", "%ED%A0%80", "a%C3"])
async def test_a_user_id_that_is_not_utf_8_is_no_other_user(mesh: FakeMesh, path: str) -> None:
    response = await delete(mesh, path)
    assert response.status_code == 422
    assert ErrorBody.model_validate_json(response.content).context["field"] == "user_id"
    assert not mesh.services["sequence"].started["forget"]


async def test_a_store_out_of_reach_is_no_success(mesh: FakeMesh) -> None:
    mesh.services["sequence"].plan("forget", *2 * [Fault(error=StoreUnavailableError("gone"))])
    response = await delete(mesh, "42")
    assert response.status_code == 503


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_what_was_made_of_the_log_is_forgotten_behind_it_or_it_is_no_success(
    mesh: FakeMesh, num_failures: int
) -> None:
    speculative = mesh.services["speculative"]
    speculative.plan("forget", *num_failures * [Fault(error=StoreUnavailableError("gone"))])
    response = await delete(mesh, "42")
    assert response.status_code == (503 if num_failures == 2 else 200)
    assert mesh.services["sequence"].started["forget"] == 1
    assert speculative.started["forget"] == min(num_failures + 1, 2)


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        (["sequence"], "sequence"),
        (["speculative"], "speculative"),
        (["sequence", "speculative"], "sequence, speculative"),
    ],
)
async def test_what_is_left_is_named_and_everything_else_is_forgotten(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, broken: list[str], left: str
) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(BudgetRouter, "forget", lambda _, user: forgotten.append(user))
    for name in broken:
        mesh.services[name].plan("forget", *2 * [Fault(error=StoreUnavailableError("gone"))])
    response = await delete(mesh, "42")
    error = ErrorBody.model_validate_json(response.content)
    assert (response.status_code, error.code, error.context["left"]) == (503, "store_unavailable", left)
    assert f"gone; what {left} holds of the user is not deleted yet: ask again" == error.message
    assert all(mesh.services[name].started["forget"] for name in ("sequence", "speculative"))
    assert forgotten == [42]
    assert (await delete(mesh, "42")).status_code == 200


async def test_a_request_under_way_leaves_nothing_of_a_user_who_is_forgotten(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[EntityId, bool] = {}
    monkeypatch.setattr(
        BudgetRouter, "observe", lambda _, served: kept.update({served.user: served.signals is not None})
    )
    explored: list[EntityId] = []
    monkeypatch.setattr(BudgetRouter, "choose", lambda router, _: router.decide("full", "exploration", explores=True))
    monkeypatch.setattr(mesh.ingress.exploration, "_keep", lambda answer: _note(explored, answer.user))
    for name in ("full", "light"):
        signalling(mesh.services[f"ranking:{name}"])
    reading, read = asyncio.Event(), asyncio.Event()
    encode = mesh.services["sequence"].inner.encode

    async def slow_encode(task: EncodeTask) -> UserState:
        reading.set()
        await read.wait()
        state: UserState = await encode(task)
        return state

    async def late_forget(user: EntityId) -> bool:
        late.append(asyncio.create_task(mesh.ingress.rank(RankRequest(user_id=user, candidates=[1, 2]))))
        await asyncio.sleep(0)
        return True

    late: list[asyncio.Task[Any]] = []
    mesh.services["sequence"].inner.encode = slow_encode
    monkeypatch.setattr(mesh.services["sequence"].inner, "forget", late_forget)
    ranked = [asyncio.create_task(mesh.ingress.rank(RankRequest(user_id=user, candidates=[1, 2]))) for user in ("7", 8)]
    await reading.wait()
    await mesh.ingress.forget(7)
    read.set()
    await asyncio.gather(*ranked, *late)
    assert (kept, explored, len(mesh.ingress._under_way)) == ({7: False, 8: True}, [8], 0)
    await mesh.ingress.rank(RankRequest(user_id=7, candidates=[1, 2]))
    assert kept[7]
    await mesh.ingress.aclose()


async def _note(explored: list[EntityId], user: EntityId) -> None:
    explored.append(user)


def signalling(ranking: FaultyService) -> None:
    """Let a fake tier say exits and signals, as one that explores does."""
    rank = ranking.inner.rank

    async def with_signals(task: RankTask, *inputs: Any) -> RankedList:
        answer: RankedList = await rank(task, *inputs)
        exits = np.zeros((len(answer.order), 2, 2), np.float32)
        return replace(answer, exits=exits, signals=np.ones(3, np.float32))

    ranking.inner.rank = with_signals


async def test_the_router_forgets(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(BudgetRouter, "forget", lambda _, user: forgotten.append(user))
    await delete(mesh, "042")
    await delete(mesh, "42")
    assert forgotten == ["042", 42]
