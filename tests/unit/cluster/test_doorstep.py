"""The first look in front of Serve's own handling: where it is, what it lets by, and that Serve takes it up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ray.serve._private import http_util
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.config import MeshConfig
from cluster.doorstep import Doorstep, middlewares
from cluster.environment import MeshFolders, ray_environment
from services.ingress.first_look import FirstLook
from tests.helpers.admission import HandClock, rank_gate
from tests.unit.services.ingress.test_auth import TOKENS


@pytest.fixture(autouse=True)
def nobody_looks() -> Iterator[None]:
    before = Doorstep._look, Doorstep._thread
    Doorstep._look, Doorstep._thread = None, 0
    yield
    Doorstep._look, Doorstep._thread = before


async def serves(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("Serve's")(scope, receive, send)


async def status_of(path: str) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Doorstep(serves)), base_url="http://mesh") as client:
        return (await client.get(path)).status_code


def asks_for_tokens() -> FirstLook:
    return FirstLook(rank_gate(HandClock()), TOKENS, frozenset())


async def test_a_process_without_an_ingress_lets_everything_pass() -> None:
    assert await status_of("/v1/status") == 200


async def test_an_ingress_looks_first() -> None:
    Doorstep.take(asks_for_tokens())
    assert await status_of("/v1/status") == 401


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes"])
async def test_the_balancers_health_checks_carry_no_token(path: str) -> None:
    Doorstep.take(asks_for_tokens())
    assert await status_of(path) == 200


async def test_what_passes_for_serve_is_still_looked_at_by_the_api() -> None:
    seen: list[Scope] = []

    async def remembers(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await serves(scope, receive, send)

    look = asks_for_tokens()
    Doorstep.take(look)
    transport = httpx.ASGITransport(Doorstep(remembers))
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        assert (await client.get("/v1/status")).status_code == 401
        for path in ("/-/nothing", "/-/%2e%2e/v1/status"):
            assert (await client.get(path)).status_code == 200, path
    assert [scope["path"] for scope in seen] == ["/-/nothing", "/-/../v1/status"]

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        await look.pass_on(serves, scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="http://mesh") as client:
        for path in ("/-/nothing", "/-/%2e%2e/v1/status"):
            assert (await client.get(path)).status_code == 401, path


async def test_a_look_is_of_the_thread_that_the_ingress_runs_on() -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(Doorstep.take, asks_for_tokens()).result()
        assert await status_of("/v1/status") == 200
        assert thread.submit(asyncio.run, status_of("/v1/status")).result() == 401
    assert threading.get_ident() != Doorstep._thread


def test_serve_finds_it_by_the_path_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    variables = ray_environment(MeshConfig(), MeshFolders.of(Path("/data/var"), "a"), Path("/code"))
    monkeypatch.setattr(http_util, name, variables[name])
    options = http_util.configure_http_middlewares(HTTPOptions())
    for found in (options.middlewares, middlewares()):
        assert [each.cls for each in found] == [Doorstep]
