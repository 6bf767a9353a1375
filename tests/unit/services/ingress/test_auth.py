"""Bearer tokens: who is let in, as whom, what the others are told, and what never shows."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.ingress.auth import TOKEN_CHARS_MAX, Bearer, TokenEntry, TokenFile, Tokens, read_tokens
from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from services.ingress.openapi import openapi_document
from services.ingress.page_files import load_page
from shared.clock import ManualClock
from shared.errors import ConfigError, RankMeshError, UnauthenticatedError
from shared.log import JsonLogger
from shared.schema.api import ErrorBody
from tests.helpers.fake_stations import FakeMesh

FEED, OLD, ADS = "feed-" + "a" * 30, "feed-" + "b" * 30, "ads-" + "c" * 30
FEED_NUMBER = "9081726354" * 3


def entry(name: str, tenant: str, token: str) -> TokenEntry:
    return TokenEntry(name=name, tenant=tenant, sha256=hashlib.sha256(token.encode()).hexdigest())


TOKENS = Tokens([entry("feed-2", "feed", FEED), entry("feed-1", "feed", OLD), entry("ads", "ads", ADS)])
RANK = {"user_id": 42, "candidates": [3, 1, 2]}


class Sent:
    """The tenant that admission saw, beside the client."""

    def __init__(self, client: httpx.AsyncClient, mesh: FakeMesh) -> None:
        self.client = client
        self.mesh = mesh

    async def get(self, path: str, token: str | None = None, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=self.headers(token, headers))

    def headers(self, token: str | None, more: dict[str, str]) -> dict[str, str]:
        return more if token is None else {"authorization": f"Bearer {token}", **more}


@pytest.fixture
async def sent() -> AsyncIterator[Sent]:
    mesh = FakeMesh(logger=JsonLogger(stream=io.StringIO()))
    app = create_app(mesh.ingress, TOKENS)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        yield Sent(client, mesh)
    await mesh.ingress.aclose()


PROTECTED = [path for path in openapi_document(IngressConfig())["paths"] if path not in ("/healthz", "/readyz")]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT"])
async def test_everything_but_probes_and_the_page_asks_for_a_token(sent: Sent, method: str) -> None:
    for path in [*PROTECTED, "/openapi.json", "/nowhere", "/docs"]:
        response = await sent.client.request(method, path)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == 'Bearer realm="rankmesh"'
        if method != "HEAD":
            assert ErrorBody.model_validate_json(response.content).code == "unauthenticated"
    assert (await sent.client.request(method, "/")).status_code == (200 if method in ("GET", "HEAD") else 401)


async def test_probes_and_the_page_ask_for_none(sent: Sent) -> None:
    for path in ["/healthz", "/readyz", *load_page()]:
        assert (await sent.get(path)).status_code == 200, path


SPELLINGS = ["/healthz/", "http://mesh//healthz", "/healthz/../v1/status", "/HEALTHZ", "/page/../v1/status",
             "/%76%31/status", "/healthz%2f..%2fv1%2fstatus", "/v1/status;/healthz", "/v1/status?/healthz",
             "/page/..%2f..%2fhttp.py", "/v1/status%00/healthz", "/healthz%0a", "/healthz%20"]  # fmt: skip


async def test_no_spelling_of_a_path_gets_around_the_token(sent: Sent) -> None:
    for path in SPELLINGS:
        assert (await sent.get(path)).status_code == 401, path


async def test_every_token_that_somebody_has_is_let_in(sent: Sent) -> None:
    for path in ["/v1/status", "/metrics", "/v1/models", "/openapi.json"]:
        for token in [FEED, OLD, ADS]:
            assert (await sent.get(path, token)).status_code == 200, path


UNKNOWN = ["", "Bearer", "Bearer ", f"Basic {FEED}", FEED, f"Bearer {FEED[:-1]}", f"Bearer {FEED}x",
           f"Bearer {FEED} {ADS}", f"Bearer {FEED.upper()}", f"Bearer {'x' * (TOKEN_CHARS_MAX + 1)}",
           "Bearer \xff\xfe", f"Bearer {FEED},"]  # fmt: skip


async def test_a_token_that_nobody_has_is_refused_and_not_echoed(sent: Sent) -> None:
    for value in UNKNOWN:
        response = await sent.client.get("/v1/status", headers=[(b"authorization", value.encode("latin-1"))])
        assert response.status_code == 401, value
        assert "xxxx" not in response.text
        assert FEED[:-1] not in response.text


async def test_two_tokens_in_one_request_are_none(sent: Sent) -> None:
    twice = [("authorization", f"Bearer {FEED}"), ("authorization", f"Bearer {ADS}")]
    assert (await sent.client.get("/v1/status", headers=twice)).status_code == 401


async def test_a_request_is_its_tokens_tenant_whatever_it_says(sent: Sent) -> None:
    async def asked(token: str, **headers: str) -> httpx.Response:
        return await sent.client.post("/v1/rank", json=RANK, headers=sent.headers(token, headers))

    assert (await asked(FEED, **{"x-tenant": "feed"})).status_code == 200
    assert (await asked(FEED)).status_code == 200
    refused = await asked(FEED, **{"x-tenant": "ads"})
    error = ErrorBody.model_validate_json(refused.content)
    assert (refused.status_code, error.code, error.context["field"]) == (403, "forbidden", "x-tenant")
    shares: Any = sent.mesh.ingress.rank_gate._shares
    assert set(shares._held) == {"feed"}


async def test_a_tenant_named_twice_is_still_checked(sent: Sent) -> None:
    headers = [("authorization", f"Bearer {FEED}"), ("x-tenant", "feed"), ("x-tenant", "ads")]
    assert (await sent.client.post("/v1/rank", json=RANK, headers=headers)).status_code == 403


def test_every_held_token_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(held: bytes, given: bytes) -> bool:
        compared.append(held)
        return held == given

    monkeypatch.setattr("services.ingress.auth.hmac.compare_digest", compare)
    for token, name in ((FEED, "feed-2"), (OLD, "feed-1"), (ADS, "ads")):
        compared.clear()
        assert TOKENS.bearer(f"Bearer {token}".encode()).name == name
        assert len(compared) == 3
    compared.clear()
    with pytest.raises(UnauthenticatedError):
        TOKENS.bearer(b"Bearer wrong")
    assert len(compared) == 3


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_of_tokens_is_read(tmp_path: Path) -> None:
    digest = hashlib.sha256(ADS.encode()).hexdigest()
    path = write(
        tmp_path / "t.yaml",
        f"tokens:\n  - {{name: a, tenant: feed, token: {FEED}}}\n  - {{name: b, tenant: ads, sha256: {digest}}}\n",
    )
    tokens = Tokens(read_tokens(path))
    assert tokens.bearer(f"bearer  {FEED}".encode()) == Bearer("a", "feed")
    assert tokens.bearer(f"Bearer {ADS}".encode()) == Bearer("b", "ads")


BAD_FILES = {
    "empty": "",
    "no tokens": "tokens: []",
    "short": f"tokens: [{{name: a, tenant: t, token: {FEED[:10]}}}]",
    "both": f"tokens: [{{name: a, tenant: t, token: {FEED}, sha256: {'0a' * 32}}}]",
    "neither": "tokens: [{name: a, tenant: t}]",
    "no tenant": f"tokens: [{{name: a, token: {FEED}}}]",
    "name twice": f"tokens: [{{name: a, tenant: t, token: {FEED}}}, {{name: a, tenant: t, token: {ADS}}}]",
    "token twice": f"tokens: [{{name: a, tenant: t, token: {FEED}}}, {{name: b, tenant: t, token: {FEED}}}]",
    "unknown field": f"tokens: [{{name: a, tenant: t, token: {FEED}, admin: true}}]",
    "not YAML": f"tokens: [{{name: a, tenant: t, token: {FEED}",
    "a space in it": f"tokens: [{{name: a, tenant: t, token: '{FEED} x'}}]",
    "as its digest": f"tokens: [{{name: a, tenant: t, sha256: {FEED}}}]",
    "as a tenant with a space": f"tokens: [{{name: a, tenant: '{FEED} x', token: {FEED}}}]",
    "as a name": f"tokens: [{{name: '{FEED}=', tenant: t, token: {FEED}}}]",
    "as a field": f"tokens: [{{name: a, tenant: t, {FEED}: x}}]",
    "as a field of the file": f"{{tokens: [{{name: a, tenant: t, token: {FEED}}}], {FEED}: x}}",
    "as an entry": f"tokens: [{FEED}]",
    "alone": f"tokens: {FEED}",
    "in a list": f"tokens: [{{name: a, tenant: t, token: [{FEED}]}}]",
    "on two lines": f"tokens: [{{name: a, tenant: t, token: '{FEED}', token: '{ADS}'}}]",
    "a number without quotes": f"tokens: [{{name: a, tenant: t, token: {FEED_NUMBER}}}]",
}


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_file_that_breaks_a_rule_is_refused_without_showing_a_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tokens(write(tmp_path / "t.yaml", text))
    shown = caught.value.message + str(caught.value.context)
    assert "t.yaml" in shown
    assert FEED[:8] not in shown
    assert ADS[:8] not in shown
    assert FEED_NUMBER[:8] not in shown


def test_tokens_that_everybody_can_read_are_refused_and_digests_are_not(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.yaml", f"tokens: [{{name: a, tenant: t, token: {FEED}}}]", 0o644)
    with pytest.raises(ConfigError, match="everybody on this machine"):
        read_tokens(plain)
    assert read_tokens(write(tmp_path / "d.yaml", f"tokens: [{{name: a, tenant: t, sha256: {'0a' * 32}}}]", 0o644))


def test_a_changed_file_is_taken_up_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), ManualClock()
    path = write(tmp_path / "t.yaml", f"tokens: [{{name: a, tenant: t, token: {FEED}}}]")
    tokens = TokenFile(path, clock, JsonLogger(stream=stream, clock=clock))

    def is_known(token: str) -> bool:
        clock._time_s += 2.0
        try:
            tokens.admit({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})
        except RankMeshError:
            return False
        return True

    assert (is_known(FEED), is_known(ADS)) == (True, False)
    write(path, f"tokens: [{{name: new, tenant: t, token: {ADS}}}, {{name: a, tenant: t, token: {FEED}}}]")
    assert (is_known(FEED), is_known(ADS)) == (True, True)
    write(path, f"tokens: [{{name: new, tenant: t, token: {ADS}}}]")
    assert (is_known(FEED), is_known(ADS)) == (False, True)
    write(path, f"tokens: [{{name: new, token: {ADS}x")
    assert is_known(ADS)
    path.unlink()
    assert is_known(ADS)
    assert "access_list_refused" in stream.getvalue()
    assert ADS[:8] not in stream.getvalue()


def test_nothing_that_is_logged_or_printed_shows_a_token() -> None:
    held = TokenEntry.model_validate({"name": "a", "tenant": "t", "token": FEED})
    assert FEED not in repr(held) + str(held.model_dump()) + held.model_dump_json()
    stream = io.StringIO()
    JsonLogger(stream=stream).info(
        "request", authorization=f"Bearer {FEED}", headers={"Authorization": f"Bearer {FEED}"}, entry=held,
        said=f"sent 'authorization: Bearer {FEED}' twice", error=ValueError(f"bearer {FEED}"),
    )  # fmt: skip
    assert FEED not in stream.getvalue()
    assert "twice" in stream.getvalue()


def test_the_document_says_that_a_token_is_asked_for() -> None:
    document = openapi_document(IngressConfig(), asks_for_token=True)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in ("/healthz", "/readyz")
            assert ("401" in operation["responses"], "security" in operation) == (not is_open, not is_open)
    plain = openapi_document(IngressConfig())
    assert "401" not in plain["paths"]["/v1/rank"]["post"]["responses"]
