"""The HTTP API: every shape of bad input, both media types, and what a client sees of a fault."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgpack
import pytest

from services.ingress.config import IngressConfig, StageBudgets
from services.ingress.http import create_app
from shared.clock import SystemClock
from shared.errors import StageUnavailableError
from shared.hashing import ID_MAX
from shared.schema.api import ApiLimits, ErrorBody, EventsResponse, RankResponse
from tests.helpers.fake_stations import FakeMesh
from tests.helpers.faulty import HANG, Fault
from tests.helpers.waiting import until

JSON, MSGPACK = "application/json", "application/msgpack"
LIMITS = ApiLimits(
    candidates_max=8,
    events_max=3,
    body_bytes_max=2_048,
    deadline_ms_min=50,
    deadline_ms_max=20_000,
    deadline_ms_default=20_000,
)
SLOW = StageBudgets(
    preprocess_ms=20_000, sequence_ms=20_000, embedding_ms=20_000, speculative_ms=20_000, events_ms=20_000
)
CONFIG = IngressConfig(limits=LIMITS, budgets=SLOW, body_timeout_s=20)
"""Time limits that no busy machine reaches; tests of a time limit set their own."""

RANK: dict[str, Any] = {"user_id": 42, "candidates": [3, 1, 2]}
EVENT: dict[str, Any] = {"event_id": "e1", "user_id": 42, "item_id": 7, "weight": 4.5, "timestamp_s": 100}


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh(CONFIG, SystemClock())


@asynccontextmanager
async def connected(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a mesh to a client."""
    transport = httpx.ASGITransport(create_app(mesh.ingress), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        yield client
    await mesh.ingress.aclose()


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(mesh) as client:
        yield client


async def post(
    client: httpx.AsyncClient, body: bytes | dict[str, Any], path: str = "/v1/rank", **headers: str
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.post(
        path, content=content, headers={"content-type": JSON} | {k.replace("_", "-"): v for k, v in headers.items()}
    )


def refusal(response: httpx.Response, status: int, code: str) -> ErrorBody:
    """Check an error answer and return its body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == JSON
    error = ErrorBody.model_validate_json(response.content)
    assert error.code == code
    return error


async def test_a_rank_answer_keeps_its_schema_and_echoes_ids(client: httpx.AsyncClient) -> None:
    ids = [ID_MAX, 2**53 + 1, str(2**53 - 1), "9", 0, "ünï✨", "a\u0000b\n"]

    response = await post(client, {**RANK, "candidates": ids, "user_id": "42", "request_id": "mine"})

    assert response.status_code == 200
    answer = RankResponse.model_validate_json(response.content)
    assert (answer.request_id, answer.user_id, answer.num_candidates) == ("mine", "42", 7)
    echoed = [row["id"] for row in json.loads(response.content)["candidates"]]
    assert sorted(map(repr, echoed)) == sorted(map(repr, ids))
    assert echoed[:3] == [ID_MAX, 2**53 + 1, str(2**53 - 1)]


async def test_msgpack_and_json_say_the_same(client: httpx.AsyncClient) -> None:
    body = {**RANK, "candidates": [ID_MAX, 1, "x"], "request_id": "r", "speculative": False}
    as_json = await post(client, body, accept=JSON)
    as_msgpack = await post(client, msgpack.packb(body), content_type=MSGPACK, accept=MSGPACK)

    assert (as_json.headers["content-type"], as_msgpack.headers["content-type"]) == (JSON, MSGPACK)
    first, second = as_json.json(), msgpack.unpackb(as_msgpack.content)
    for answer in (first, second):
        del answer["stages"], answer["total_ms"]
    assert first == second


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/msgpack", MSGPACK),
        ("application/json;q=0.5, application/msgpack", MSGPACK),
        ("application/msgpack;q=0.2, */*;q=0.1", MSGPACK),
        ("text/html, application/json;q=0.9", JSON),
        ("application/json;q=0, */*", MSGPACK),
    ],
)
async def test_the_answer_has_the_type_that_the_client_prefers(
    client: httpx.AsyncClient, accept: str, media: str
) -> None:
    assert (await post(client, RANK, accept=accept)).headers["content-type"] == media


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "application/json;q=x", "image/*"])
async def test_a_client_that_accepts_neither_type_is_refused(client: httpx.AsyncClient, accept: str) -> None:
    refusal(await post(client, RANK, accept=accept), 406, "not_acceptable")


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"content_type": ""}, "content-type"),
        ({"content_type": "text/plain"}, "content-type"),
        ({"content_type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content_type": "application/json; charset=latin-1"}, "content-type"),
        ({"content_encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_other_content_types_are_refused(client: httpx.AsyncClient, headers: dict[str, str], field: str) -> None:
    error = refusal(await post(client, RANK, **headers), 415, "unsupported_media_type")
    assert error.context["field"] == field


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", 'application/json;charset="UTF-8"']
)
async def test_the_usual_spellings_of_json_are_accepted(client: httpx.AsyncClient, content_type: str) -> None:
    assert (await post(client, RANK, content_type=content_type)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"user_id": 1,}',
        b'{"user_id": NaN, "candidates": [1]}',
        b'{"user_id": 1, "candidates": [Infinity]}',
        b"\xff\xfe",
        b'{"user_id": "\xff", "candidates": [1]}',
        b"\xef\xbb\xbf{}",
        b'{"user_id": 1, "candidates": [1], "user_id": 2}',
        b'{"user_id": 1, "candidates": [{"a": 1, "a": 2}]}',
        b'{"user_id": ' + b"[" * 1_900,
        b'{"user_id": 1, "candidates": [1]} {}',
    ],
)
async def test_a_body_that_is_not_one_json_document_is_malformed(client: httpx.AsyncClient, body: bytes) -> None:
    refusal(await post(client, body), 400, "malformed_body")


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x82\xa7user_id\x01",
        msgpack.packb(RANK) + b"\x00",
        msgpack.packb({"user_id": "x"})[:-1] + b"\xff",
        msgpack.packb({1: 2}),
        msgpack.packb({"user_id": msgpack.ExtType(5, b"x")}),
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x91" * 2_000,
    ],
)
async def test_a_body_that_is_not_one_msgpack_document_is_malformed(client: httpx.AsyncClient, body: bytes) -> None:
    refusal(await post(client, body, content_type=MSGPACK), 400, "malformed_body")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"user_id": 2**63}, "user_id"),
        ({"user_id": 10**400}, "user_id"),
        ({"user_id": -1}, "user_id"),
        ({"user_id": 1.5}, "user_id"),
        ({"user_id": True}, "user_id"),
        ({"user_id": None}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"user_id": "x" * 257}, "user_id"),
        ({"user_id": "\ud800"}, "user_id"),
        ({"user_id": {"a": [1]}}, "user_id"),
        ({"candidates": []}, "candidates"),
        ({"candidates": 7}, "candidates"),
        ({"candidates": None}, "candidates"),
        ({"candidates": [1, None]}, "candidates.1"),
        ({"candidates": [1, 2, 1]}, "candidates.2"),
        ({"candidates": [7, "7"]}, "candidates.1"),
        ({"candidates": list(range(9))}, "candidates"),
        ({"limit": 0}, "limit"),
        ({"limit": 9}, "limit"),
        ({"limit": "3"}, "limit"),
        ({"deadline_ms": 49}, "deadline_ms"),
        ({"deadline_ms": 20_001}, "deadline_ms"),
        ({"deadline_ms": 10**100}, "deadline_ms"),
        ({"timestamp_s": -1}, "timestamp_s"),
        ({"timestamp_s": 2**40 + 1}, "timestamp_s"),
        ({"tier": "huge"}, "tier"),
        ({"tier": ""}, "tier"),
        ({"surface": "a b"}, "surface"),
        ({"surface": "x" * 65}, "surface"),
        ({"speculative": 1}, "speculative"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_a_field_that_breaks_its_rule_is_named_with_limit_and_value(
    client: httpx.AsyncClient, mesh: FakeMesh, change: dict[str, Any], field: str
) -> None:
    error = refusal(await post(client, {**RANK, **change}), 422, "invalid_request")

    assert error.context["field"] == field
    assert {"limit", "value"} <= error.context.keys()
    assert field.split(".")[0] in error.message
    assert len(error.message) < 400
    assert not mesh.services["preprocess"].started, "nothing reaches a station"


@pytest.mark.parametrize("missing", ["user_id", "candidates"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, missing: str) -> None:
    error = refusal(await post(client, {key: RANK[key] for key in RANK if key != missing}), 422, "invalid_request")
    assert (error.context["field"], error.message) == (missing, f"{missing} is missing")


@pytest.mark.parametrize("body", [b"[]", b"7", b"null", b'"x"', b"1" * 400])
async def test_a_body_that_is_no_object_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert refusal(await post(client, body), 422, "invalid_request").context["field"] == "body"


@pytest.mark.parametrize(
    ("change", "is_accepted"),
    [
        ({"candidates": list(range(7))}, True),
        ({"candidates": list(range(8))}, True),
        ({"candidates": list(range(9))}, False),
        ({"limit": 1}, True),
        ({"limit": 8}, True),
        ({"deadline_ms": 19_999}, True),
        ({"deadline_ms": 20_000}, True),
        ({"user_id": ID_MAX}, True),
        ({"user_id": 0}, True),
        ({"user_id": "x" * 256}, True),
        ({"user_id": "é" * 256}, True),
        ({"user_id": "é" * 257}, False),
        ({"user_id": 42.0}, True),
        ({"timestamp_s": 2**40}, True),
        ({"request_id": "x" * 128}, True),
    ],
)
async def test_limits_hold_at_and_beside_their_values(
    client: httpx.AsyncClient, change: dict[str, Any], is_accepted: bool
) -> None:
    assert (await post(client, {**RANK, **change})).status_code == (200 if is_accepted else 422)


@pytest.mark.parametrize("deadline_ms", [50, 51])
async def test_the_smallest_budget_is_accepted_though_it_may_not_suffice(
    client: httpx.AsyncClient, deadline_ms: int
) -> None:
    assert (await post(client, {**RANK, "deadline_ms": deadline_ms})).status_code in (200, 504)


@pytest.mark.parametrize(("size", "status"), [(2_047, 200), (2_048, 200), (2_049, 413)])
async def test_the_byte_limit_holds_at_and_beside_its_value(client: httpx.AsyncClient, size: int, status: int) -> None:
    body = json.dumps(RANK).encode()
    body += b" " * (size - len(body))

    response = await post(client, body)

    assert response.status_code == status
    if status == 413:
        assert ErrorBody.model_validate_json(response.content).context["limit"] == 2_048


async def test_the_byte_limit_holds_without_a_content_length(client: httpx.AsyncClient) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 512

    response = await client.post("/v1/rank", content=chunks(), headers={"content-type": JSON})

    refusal(response, 413, "payload_too_large")
    assert sent <= 6, "the rest is not read"


async def test_an_absurd_content_length_is_refused_unread(client: httpx.AsyncClient) -> None:
    refusal(await post(client, RANK, content_length="9" * 30), 413, "payload_too_large")


async def test_a_body_that_trickles_in_is_given_up() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with connected(FakeMesh(CONFIG.model_copy(update={"body_timeout_s": 0.02}), SystemClock())) as client:
        response = await client.post("/v1/rank", content=chunks(), headers={"content-type": JSON})

    assert refusal(response, 408, "slow_body").context["limit"] == 0.02


async def test_msgpack_numbers_keep_their_kind(client: httpx.AsyncClient) -> None:
    nan = b"\x82\xa7user_id\xcb" + struct.pack(">d", float("nan")) + b"\xaacandidates\x91\x01"
    for body in (nan, msgpack.packb({**RANK, "user_id": 42.0}), msgpack.packb({**RANK, "user_id": b"bytes"})):
        refusal(await post(client, body, content_type=MSGPACK), 422, "invalid_request")


async def test_events_are_appended(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    response = await post(client, {"events": [EVENT, {**EVENT, "event_id": "e2"}]}, "/v1/events")

    expected = EventsResponse(appended=2, duplicates=0, expired=0, buffered=0)
    assert EventsResponse.model_validate_json(response.content) == expected
    assert [event.event_id for event in mesh.services["sequence"].inner.appended] == ["e1", "e2"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"event_id": ""}, "events.0.event_id"),
        ({"weight": "4"}, "events.0.weight"),
        ({"weight": -0.1}, "events.0.weight"),
        ({"weight": 1e39}, "events.0.weight"),
        ({"timestamp_s": 1.5}, "events.0.timestamp_s"),
        ({"timestamp_s": 2**40 - 1}, "events.0.timestamp_s"),
        ({"item_id": -5}, "events.0.item_id"),
        ({"extra": 1}, "events.0.extra"),
    ],
)
async def test_bad_events_are_refused(client: httpx.AsyncClient, change: dict[str, Any], field: str) -> None:
    error = refusal(await post(client, {"events": [{**EVENT, **change}]}, "/v1/events"), 422, "invalid_request")
    assert error.context["field"] == field


@pytest.mark.parametrize(("count", "status"), [(0, 422), (1, 200), (3, 200), (4, 422)])
async def test_the_number_of_events_is_bounded(client: httpx.AsyncClient, count: int, status: int) -> None:
    events = [{**EVENT, "event_id": f"e{index}"} for index in range(count)]
    assert (await post(client, {"events": events}, "/v1/events")).status_code == status


async def test_an_append_is_tried_twice_and_then_503(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    gone = Fault(error=StageUnavailableError("died", stage="sequence"))
    mesh.services["sequence"].plan("append", gone)
    assert (await post(client, {"events": [EVENT]}, "/v1/events")).status_code == 200
    mesh.services["sequence"].always("append", gone)

    response = await post(client, {"events": [EVENT]}, "/v1/events")

    refusal(response, 503, "stage_unavailable")
    assert response.headers["retry-after"] == "1"
    assert mesh.services["sequence"].started["append"] == 4


async def test_an_append_that_hangs_is_504() -> None:
    mesh = FakeMesh(CONFIG.model_copy(update={"budgets": SLOW.model_copy(update={"events_ms": 20})}), SystemClock())
    mesh.services["sequence"].always("append", HANG)

    async with connected(mesh) as client:
        refusal(await post(client, {"events": [EVENT]}, "/v1/events"), 504, "deadline_exceeded")

    assert mesh.services["sequence"].in_flight == 0


async def test_errors_keep_their_status(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.services["preprocess"].always("extract", Fault(error=StageUnavailableError("gone", stage="preprocess")))
    unavailable = await post(client, RANK)
    refusal(unavailable, 503, "stage_unavailable")
    assert unavailable.headers["retry-after"] == "1"

    mesh.services["preprocess"].always("extract", None)
    for tier in ("full", "light"):
        mesh.services[f"ranking:{tier}"].always("rank", HANG)
    refusal(await post(client, {**RANK, "deadline_ms": 50}), 504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("headers", "change", "status"),
    [
        ({"x_request_timeout_ms": "50"}, {}, 504),
        ({"x_request_timeout_ms": "50"}, {"deadline_ms": 20_000}, 504),
        ({"x_request_timeout_ms": "20000"}, {"deadline_ms": 50}, 504),
    ],
)
async def test_the_smaller_of_header_and_field_is_the_budget(
    client: httpx.AsyncClient, mesh: FakeMesh, headers: dict[str, str], change: dict[str, int], status: int
) -> None:
    for tier in ("full", "light"):
        mesh.services[f"ranking:{tier}"].always("rank", HANG)
    error = refusal(await post(client, {**RANK, **change}, **headers), status, "deadline_exceeded")
    assert error.context["deadline_ms"] == 50
    assert mesh.in_flight() == 0


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"x_request_timeout_ms": "49"}, "x-request-timeout-ms"),
        ({"x_request_timeout_ms": "20001"}, "x-request-timeout-ms"),
        ({"x_request_timeout_ms": "1e3"}, "x-request-timeout-ms"),
        ({"x_request_timeout_ms": "9" * 10}, "x-request-timeout-ms"),
        ({"x_tenant": "two words"}, "x-tenant"),
        ({"x_tenant": "x" * 129}, "x-tenant"),
    ],
)
async def test_headers_keep_their_limits(client: httpx.AsyncClient, headers: dict[str, str], field: str) -> None:
    error = refusal(await post(client, RANK, **headers), 422, "invalid_request")
    assert error.context["field"] == field
    assert {"limit", "value"} <= error.context.keys()


async def test_overload_is_429_with_retry_after_before_the_body_is_read(
    client: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.ingress.rank_gate.in_flight = CONFIG.in_flight_max

    response = await post(client, b"not even json")

    refusal(response, 429, "overloaded")
    assert response.headers["retry-after"] == str(CONFIG.retry_after_s)
    mesh.ingress.rank_gate.in_flight = 0


async def test_an_error_nobody_planned_is_500_without_its_inside(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.ingress.mesh_status = None  # type: ignore[assignment,method-assign]  # calling it raises TypeError

    error = refusal(await client.get("/v1/status"), 500, "internal")

    assert "NoneType" not in error.message


@pytest.mark.parametrize("path", ["/v1/models", "/v1/status", "/healthz", "/readyz", "/openapi.json"])
async def test_views_answer_get_and_head(client: httpx.AsyncClient, path: str) -> None:
    got, head = await client.get(path), await client.head(path)

    assert (got.status_code, head.status_code) == (200, 200)
    assert got.headers["content-type"] == JSON
    assert head.content == b""
    assert head.headers["content-length"] == str(len(got.content)) or path == "/v1/status"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/rank", "POST"),
        ("PUT", "/v1/events", "POST"),
        ("DELETE", "/healthz", "GET, HEAD"),
        ("OPTIONS", "/v1/rank", "POST"),
        ("TRACE", "/v1/status", "GET, HEAD"),
    ],
)
async def test_other_methods_are_405_with_the_allowed_ones(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await client.request(method, path)

    refusal(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/rank/", "/page/../config.py", "/v1/samples"])
async def test_unknown_paths_are_404(client: httpx.AsyncClient, path: str) -> None:
    refusal(await client.get(path), 404, "not_found")


async def test_readiness_names_the_station_that_is_missing(client: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.directory.down = {"ranking:full", "sequence"}
    assert (await client.get("/readyz")).status_code == 200, "one tier is enough, and sequence can be done without"

    mesh.directory.down = {"ranking:full", "ranking:light"}
    error = refusal(await client.get("/readyz"), 503, "stage_unavailable")

    assert error.message == "no live replica of ranking:full, ranking:light"
    assert (await client.get("/v1/status")).json()["ready"] is False
    assert (await client.get("/healthz")).status_code == 200


async def test_a_client_that_goes_away_takes_its_work_with_it(mesh: FakeMesh) -> None:
    mesh.services["sequence"].always("encode", HANG)
    app = create_app(mesh.ingress)
    gone = asyncio.Event()
    parts = [{"type": "http.request", "body": json.dumps(RANK).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/rank", "raw_path": b"/v1/rank", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": ("c", 1), "server": ("s", 2),
    }  # fmt: skip
    request = asyncio.create_task(app(scope, receive, send))
    await until(lambda: mesh.services["sequence"].in_flight == 1)

    gone.set()

    await until(lambda: mesh.in_flight() == 0)
    await request
    assert mesh.ingress.rank_gate.in_flight == 0
    assert mesh.ingress.counters()["requests.rank.cancelled"] == 1
