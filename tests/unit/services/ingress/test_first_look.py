"""The first look at a request: what is refused by its headers alone, once, and that nothing else changes by it."""

from __future__ import annotations

import io
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from services.ingress.first_look import APPROACH, FirstLook
from services.ingress.http import create_app
from shared.errors import OverloadedError
from shared.log import JsonLogger
from shared.schema.api import ErrorBody
from tests.helpers.admission import HandClock, ask, poisson, rank_gate, simulate
from tests.helpers.fake_stations import FakeMesh
from tests.unit.services.ingress.test_auth import FEED, TOKENS

RANK = {"user_id": 42, "candidates": [3, 1, 2]}
OPEN = frozenset({"/healthz"})


class Behind:
    """What is behind the look: it says whom a request is of, and how often it was reached."""

    def __init__(self) -> None:
        self.num_reached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_reached += 1
        headers = Request(scope).headers
        answer = PlainTextResponse(f"{headers.get('x-tenant', '-')} {headers.get('authorization', '-')}")
        await answer(scope, receive, send)


class Looked:
    """A look, and what is behind it, as one application."""

    def __init__(self, look: FirstLook, *, times: int = 1) -> None:
        self.behind = Behind()
        self._look = look
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._from(self._times, scope, receive, send)

    async def _from(self, times: int, scope: Scope, receive: Receive, send: Send) -> None:
        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            await self._from(times - 1, scope, receive, send)

        await self._look.pass_on(inner if times > 1 else self.behind, scope, receive, send)


def full_gate(held: ExitStack) -> Any:
    """Return a gate whose queue is full, until ``held`` ends."""
    clock = HandClock()
    gate = rank_gate(clock)
    simulate(gate, clock, poisson(60, 0, 10, 1, ask()))
    with suppress(OverloadedError):
        while True:
            held.enter_context(gate.admit(ask()))
    return gate


async def call(app: Any, method: str, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mesh") as client:
        return await client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def test_a_rank_request_without_a_chance_is_refused_before_anything_behind_is_reached() -> None:
    with ExitStack() as held:
        app = Looked(FirstLook(full_gate(held), None, OPEN))
        response = await call(app, "POST", "/v1/rank")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert ErrorBody.model_validate_json(response.content).code == "overloaded"
    assert app.behind.num_reached == 0


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/rank"), ("POST", "/v1/events"), ("POST", "/v1/rank/"), ("GET", "/metrics")]
)
async def test_nothing_else_is_refused_for_want_of_capacity(method: str, path: str) -> None:
    with ExitStack() as held:
        app = Looked(FirstLook(full_gate(held), None, OPEN))
        assert (await call(app, method, path)).status_code == 200
    assert app.behind.num_reached == 1


async def test_a_request_is_looked_at_once_by_whoever_gets_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = rank_gate(HandClock())
    seen: list[str] = []
    monkeypatch.setattr(gate, "check", seen.append)
    app = Looked(FirstLook(gate, TOKENS, OPEN), times=3)
    response = await call(app, "POST", "/v1/rank", authorization=f"Bearer {FEED}")
    assert (response.text, seen) == ("feed -", ["feed"])


async def test_a_client_cannot_say_that_it_was_looked_at() -> None:
    app = Looked(FirstLook(rank_gate(HandClock()), TOKENS, OPEN))
    response = await call(app, "POST", "/v1/rank", **{APPROACH: "None"})
    assert (response.status_code, app.behind.num_reached) == (401, 0)


async def test_who_has_no_token_does_not_learn_how_full_it_is() -> None:
    with ExitStack() as held:
        app = Looked(FirstLook(full_gate(held), TOKENS, OPEN))
        assert (await call(app, "POST", "/v1/rank")).status_code == 401
        assert (await call(app, "POST", "/v1/rank", authorization=f"Bearer {FEED}")).status_code == 429


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_probe_needs_no_token(method: str) -> None:
    app = Looked(FirstLook(rank_gate(HandClock()), TOKENS, OPEN))
    assert (await call(app, method, "/healthz")).status_code == 200
    assert (await call(app, "POST", "/healthz")).status_code == 401


async def test_the_look_is_at_the_tenant_that_the_request_names(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = rank_gate(HandClock())
    named: list[str] = []
    monkeypatch.setattr(gate, "check", named.append)
    app = Looked(FirstLook(gate, None, OPEN))
    for tenant in ("ads", "two words", ""):
        await call(app, "POST", "/v1/rank", x_tenant=tenant)
    await call(app, "POST", "/v1/rank")
    assert named == ["ads", "", "", ""]


async def test_no_path_reaches_ranking_past_the_look() -> None:
    mesh = FakeMesh(logger=JsonLogger(stream=io.StringIO()))
    transport = httpx.ASGITransport(create_app(mesh.ingress))
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        for path, status in (("/v1/rank", 200), ("/v1/%72ank", 200), ("/v1/rank%0A", 404), ("/v1/rank/", 404)):
            response = await client.post(path, json=RANK)
            assert response.status_code == status, (path, response.text)
    await mesh.ingress.aclose()


@pytest.mark.parametrize(("name", "value"), [("x-tenant", "ads"), ("x-request-timeout-ms", "500")])
async def test_a_header_that_is_there_twice_is_refused(name: str, value: str) -> None:
    mesh = FakeMesh(logger=JsonLogger(stream=io.StringIO()))
    transport = httpx.ASGITransport(create_app(mesh.ingress))
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        for headers, status in (([(name, value)], 200), ([(name, value)] * 2, 422)):
            response = await client.post("/v1/rank", json=RANK, headers=headers)
            assert response.status_code == status, response.text
    await mesh.ingress.aclose()
    error = ErrorBody.model_validate_json(response.content)
    assert (error.code, error.context["field"], error.context["value"]) == ("invalid_request", name, 2)
