from __future__ import annotations

from collections.abc import Callable

import httpx
import msgpack
import orjson
import pytest

from benchmarks.client import SHED_MAX, Answer, MeshClient, Wire, count_outcomes
from shared.clock import ManualClock
from shared.schema.api import RankRequest

REQUEST = RankRequest(user_id=1, candidates=[1, 2], timestamp_s=9)


def response_body(**fields: object) -> dict[str, object]:
    body: dict[str, object] = {
        "request_id": "r",
        "user_id": 1,
        "weights_version": "v",
        "tier": "full",
        "tier_reason": "default",
        "candidates": [{"id": 2, "scores": {"click": 0.5}, "value": 0.5, "scored_by": "full", "speculative": "none"}],
        "num_candidates": 2,
        "history_length": 0,
        "degraded": [],
        "reasons": {},
        "num_oov": {},
        "stages": [],
        "total_ms": 3.0,
    }
    return {**body, **fields}


async def ask(handler: Callable[[httpx.Request], httpx.Response], wire: Wire = "json") -> Answer:
    async with MeshClient("http://mesh/", 1.0, 2, ManualClock(), httpx.MockTransport(handler)) as client:
        return await client.rank(REQUEST, wire)


async def test_a_whole_answer_is_ok_and_a_marked_one_degraded() -> None:
    whole = await ask(lambda _: httpx.Response(200, json=response_body()))
    marked = await ask(
        lambda _: httpx.Response(200, json=response_body(degraded=["sequence"], reasons={"sequence": "late"}))
    )
    assert (whole.outcome, marked.outcome) == ("ok", "degraded")
    assert whole.body is not None
    assert whole.body.candidates[0].id == 2


async def test_the_token_of_the_command_line_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_TOKEN", "t0ken-of-the-client")
    sent: list[str | None] = []

    def mesh(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return httpx.Response(200, json=response_body())

    await ask(mesh)
    assert sent == ["Bearer t0ken-of-the-client"]


@pytest.mark.parametrize("wire", ["json", "msgpack"])
async def test_both_wire_forms_carry_the_same_request(wire: Wire) -> None:
    seen: list[object] = []

    def mesh(request: httpx.Request) -> httpx.Response:
        decode = orjson.loads if wire == "json" else msgpack.unpackb
        seen.append(decode(request.content))
        assert request.headers["accept"] == request.headers["content-type"] == f"application/{wire}"
        encode = orjson.dumps if wire == "json" else msgpack.packb
        return httpx.Response(200, content=encode(response_body()), headers={"content-type": f"application/{wire}"})

    assert (await ask(mesh, wire)).outcome == "ok"
    assert seen == [
        {"user_id": 1, "candidates": [1, 2], "surface": "ml-1m", "timestamp_s": 9, "tier": "auto", "speculative": True}
    ]


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "shed"), (503, "unavailable"), (504, "deadline"), (500, "failed"), (422, "rejected")]
)
async def test_error_statuses_have_their_outcome_and_body(status: int, outcome: str) -> None:
    error = {"code": "c", "message": "m", "context": {"field": "f"}}
    answer = await ask(lambda _: httpx.Response(status, json=error))
    assert (answer.outcome, answer.status) == (outcome, status)
    assert answer.error is not None
    assert answer.error.context == {"field": "f"}


async def test_an_error_without_our_body_keeps_its_outcome() -> None:
    answer = await ask(lambda _: httpx.Response(503, text="<html>no server</html>"))
    assert (answer.outcome, answer.error) == ("unavailable", None)
    assert "no server" in answer.detail


@pytest.mark.parametrize("content", [b"", b"{", b"[]", orjson.dumps({"total_ms": 1})])
async def test_a_2xx_that_is_no_answer_is_garbled(content: bytes) -> None:
    assert (await ask(lambda _: httpx.Response(200, content=content))).outcome == "garbled"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(httpx.ReadTimeout("t"), "hung"), (httpx.ReadError("r"), "broken"), (httpx.ConnectError("c"), "broken")],
)
async def test_transport_failures_are_outcomes(error: Exception, outcome: str) -> None:
    def mesh(request: httpx.Request) -> httpx.Response:
        raise error

    answer = await ask(mesh)
    assert (answer.outcome, answer.status) == (outcome, 0)


def test_outcomes_are_counted_most_frequent_first() -> None:
    answers = [Answer("ok", 200, 1.0), Answer("shed", 429, 1.0), Answer("ok", 200, 1.0)]
    assert list(count_outcomes(answers).items()) == [("ok", 2), ("shed", 1)]


class _Hand(ManualClock):
    """A clock that sleeps by jumping."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep_s(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.mark.parametrize(("num_refusals", "outcome"), [(0, "ok"), (3, "ok"), (SHED_MAX + 1, "shed")])
async def test_who_is_patient_comes_back_when_told_to(num_refusals: int, outcome: str) -> None:
    asked: list[bytes] = []
    error = {"code": "overloaded", "message": "m", "context": {}}

    def mesh(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        if len(asked) <= num_refusals:
            return httpx.Response(429, json=error, headers={"retry-after": "2"})
        return httpx.Response(200, json=response_body())

    clock = _Hand()
    async with MeshClient("http://mesh/", 1.0, 2, clock, httpx.MockTransport(mesh)) as client:
        answer = await client.rank_patiently(REQUEST)
    num_waits = min(num_refusals, SHED_MAX)
    assert (answer.outcome, answer.num_shed, clock.slept) == (outcome, num_waits, [2] * num_waits)
    assert len(asked) == num_waits + 1
    assert len(set(asked)) == 1
