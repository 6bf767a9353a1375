"""Everything a client may get wrong, over HTTP: status, code, and what the error says of field, limit and value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import httpx
import msgpack
import pytest

from benchmarks.site import Site

JSON = "application/json"
MSGPACK = "application/msgpack"
GOOD = {"user_id": 1, "candidates": [1, 2, 3]}


@dataclass(frozen=True)
class Bad:
    """One wrong request and the answer it must get."""

    name: str
    content: bytes
    status: int
    code: str
    where: str
    content_type: str = JSON
    path: str = "/v1/rank"
    headers: dict[str, str] = field(default_factory=dict)


def rank(name: str, where: str, **fields: object) -> Bad:
    """Return a rank request with some fields replaced, refused with 422 for ``where``."""
    return Bad(name, json.dumps({**GOOD, **fields}).encode(), 422, "invalid_request", where)


def event(name: str, where: str, **fields: object) -> Bad:
    """Return an append of one event with some fields replaced, refused with 422 for ``where``."""
    good = {"event_id": "e", "user_id": 1, "item_id": 1, "weight": 4, "timestamp_s": 9}
    content = json.dumps({"events": [{**good, **fields}]}).encode()
    return Bad(name, content, 422, "invalid_request", where, path="/v1/events")


CASES = [
    rank("unknown field", "extra", extra=1),
    Bad("missing user", b'{"candidates": [1]}', 422, "invalid_request", "user_id"),
    Bad("missing candidates", b'{"user_id": 1}', 422, "invalid_request", "candidates"),
    rank("no candidates", "candidates", candidates=[]),
    rank("too many candidates", "candidates", candidates=list(range(2_001))),
    rank("candidate twice", "candidates.1", candidates=[7, 7]),
    rank("candidate twice in two spellings", "candidates.1", candidates=[7, "7"]),
    rank("candidate null", "candidates.1", candidates=[1, None]),
    rank("candidate float", "candidates.0", candidates=[1.5]),
    rank("candidate boolean", "candidates.0", candidates=[True]),
    rank("candidate object", "candidates.0", candidates=[{"id": 1}]),
    rank("candidate negative", "candidates.0", candidates=[-1]),
    rank("candidate beyond 64 bits", "candidates.0", candidates=[2**63]),
    rank("candidate far beyond 64 bits", "candidates.0", candidates=[10**400]),
    rank("candidate empty", "candidates.0", candidates=[""]),
    rank("candidate too long", "candidates.0", candidates=["x" * 257]),
    rank("user boolean", "user_id", user_id=False),
    rank("user beyond 64 bits", "user_id", user_id=2**64),
    rank("user lone surrogate", "user_id", user_id="\ud800"),
    rank("limit zero", "limit", limit=0),
    rank("limit as text", "limit", limit="5"),
    rank("limit over the deployment's", "limit", limit=9_999),
    rank("time negative", "timestamp_s", timestamp_s=-1),
    rank("time float", "timestamp_s", timestamp_s=1.5),
    rank("deadline zero", "deadline_ms", deadline_ms=0),
    rank("deadline over the deployment's", "deadline_ms", deadline_ms=10_001),
    rank("unknown tier", "tier", tier="gigantic"),
    rank("tier that is no name", "tier", tier="../full"),
    rank("surface that is no name", "surface", surface="a b"),
    rank("speculative as text", "speculative", speculative="yes"),
    rank("request id with a line break", "request_id", request_id="a\nb"),
    Bad("NaN", b'{"user_id": 1, "candidates": [NaN]}', 400, "malformed_body", "body"),
    Bad("infinity", b'{"user_id": 1, "candidates": [Infinity]}', 400, "malformed_body", "body"),
    Bad("field twice", b'{"user_id": 1, "user_id": 2, "candidates": [1]}', 400, "malformed_body", "user_id"),
    Bad("empty", b"", 400, "malformed_body", "body"),
    Bad("cut off", b'{"user_id": 1, "candi', 400, "malformed_body", "body"),
    Bad("not UTF-8", b'{"user_id": "\xff"}', 400, "malformed_body", "body"),
    Bad("nested too deeply", b"[" * 100_000, 400, "malformed_body", "body"),
    Bad("an array", b"[1]", 422, "invalid_request", "body"),
    Bad("msgpack cut off", msgpack.packb(GOOD)[:-1], 400, "malformed_body", "body", MSGPACK),
    Bad("msgpack extension", msgpack.packb(msgpack.ExtType(5, b"x")), 400, "malformed_body", "body", MSGPACK),
    Bad(
        "msgpack NaN",
        msgpack.packb({**GOOD, "candidates": [float("nan")]}),
        422,
        "invalid_request",
        "candidates.0",
        MSGPACK,
    ),
    Bad("JSON called msgpack", json.dumps(GOOD).encode(), 400, "malformed_body", "body", MSGPACK),
    Bad("plain text", json.dumps(GOOD).encode(), 415, "unsupported_media_type", "content-type", "text/plain"),
    Bad("no content type", json.dumps(GOOD).encode(), 415, "unsupported_media_type", "content-type", ""),
    Bad(
        "compressed",
        json.dumps(GOOD).encode(),
        415,
        "unsupported_media_type",
        "content-encoding",
        headers={"content-encoding": "gzip"},
    ),
    Bad("answer in XML", json.dumps(GOOD).encode(), 406, "not_acceptable", "accept", headers={"accept": "text/xml"}),
    Bad("body too large", b" " * (1 << 20) + b"{}", 413, "payload_too_large", "body"),
    Bad("no events", b'{"events": []}', 422, "invalid_request", "events", path="/v1/events"),
    event("event weight NaN as text", "events.0.weight", weight="NaN"),
    event("event weight negative", "events.0.weight", weight=-1),
    event("event id with a blank", "events.0.event_id", event_id="a b"),
    event("event user too long", "events.0.user_id", user_id="u" * 300),
    event("event time too late", "events.0.timestamp_s", timestamp_s=2**41),
    event("event with an unknown field", "events.0.rating", rating=5),
]


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_is_refused_by_name(site: Site, bad: Bad) -> None:
    headers = {**({"content-type": bad.content_type} if bad.content_type else {}), **bad.headers}
    response = httpx.post(f"{site.url}{bad.path}", content=bad.content, headers=headers, trust_env=False)
    assert response.status_code == bad.status, response.text
    error = response.json()
    assert error["code"] == bad.code
    assert error["message"]
    assert error["context"]["field"] == bad.where
    assert {"limit", "value"} <= set(error["context"])


def test_the_mesh_still_ranks_after_all_of_them(site: Site) -> None:
    response = httpx.post(f"{site.url}/v1/rank", json=GOOD, trust_env=False)
    assert response.status_code == 200
    assert response.json()["degraded"] == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/rank", 405, "method_not_allowed"),
        ("DELETE", "/v1/events", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_error_bodies_too(
    site: Site, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, f"{site.url}{path}", trust_env=False)
    assert (response.status_code, response.json()["code"]) == (status, code)
