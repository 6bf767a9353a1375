"""Forgetting a user over HTTP."""

from __future__ import annotations

import httpx
import pytest

from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from services.ingress.routing import BudgetRouter
from shared.clock import SystemClock
from shared.errors import StoreUnavailableError
from shared.schema.api import ErrorBody, Event, ForgetResponse
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import Fault


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


async def test_the_router_forgets(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(BudgetRouter, "forget", lambda _, user: forgotten.append(user))
    await delete(mesh, "042")
    await delete(mesh, "42")
    assert forgotten == ["042", 42]
