"""The command line's HTTP client, against a fake network."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import orjson
import pytest

from cluster.cli.client import Client
from services.ingress.directory import StatusBody
from shared.errors import InvalidRequestError, OverloadedError, RankMeshError, StageUnavailableError
from shared.schema.api import Event, EventsRequest, RankRequest
from tests.helpers.mesh_answers import answer, status_body

REQUEST = RankRequest(user_id=1, candidates=[1, 2])


def client(respond: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://mesh.test/", transport=httpx.MockTransport(respond))


def test_rank_sends_only_what_was_set_and_validates_the_answer() -> None:
    seen: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=answer())

    with client(respond) as mesh:
        assert mesh.rank(REQUEST).total_ms == 20.0
    assert str(seen[0].url) == "http://mesh.test/v1/rank"
    assert "deadline_ms" not in orjson.loads(seen[0].content)
    assert seen[0].headers["content-type"] == "application/json"


def test_events_and_status() -> None:
    event = Event(event_id="e", user_id=1, item_id=2, weight=3, timestamp_s=4)
    with client(
        lambda _: httpx.Response(200, json={"appended": 1, "duplicates": 0, "expired": 0, "buffered": 0})
    ) as mesh:
        assert mesh.append(EventsRequest(events=[event])).appended == 1
    with client(lambda _: httpx.Response(200, content=status_body().model_dump_json())) as mesh:
        assert mesh.fetch(StatusBody, "/v1/status") == status_body()


@pytest.mark.parametrize(
    ("code", "cls"), [("overloaded", OverloadedError), ("invalid_request", InvalidRequestError), ("new", RankMeshError)]
)
def test_error_bodies_become_errors_of_their_code(code: str, cls: type[RankMeshError]) -> None:
    body = {"code": code, "message": "no", "context": {"limit": 3}}
    with client(lambda _: httpx.Response(429, json=body)) as mesh, pytest.raises(RankMeshError) as caught:
        mesh.rank(REQUEST)
    assert type(caught.value) is cls
    assert (caught.value.message, caught.value.context) == ("no", {"limit": 3})


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def hang(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("late", request=request)


def babble(request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("illegal status line", request=request)


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (refuse, "no mesh answers at http://mesh.test; start one with `rankmesh up`"),
        (hang, "did not answer within 30 s"),
        (
            lambda _: httpx.Response(502, text="<html>"),
            "502 with something that is not JSON; is it the port for clients?",
        ),
        (lambda _: httpx.Response(500, json=["odd"]), "answered 500"),
        (lambda _: httpx.Response(200, json={"total_ms": 1}), "a RankResponse that is not one"),
        (lambda _: httpx.Response(200, json={"total_ms": 1}), "no rankmesh of this version: request_id is missing"),
        (lambda _: httpx.Response(404, text="<html>"), "that is not a rankmesh: http://mesh.test/v1/rank answered 404"),
        (lambda _: httpx.Response(404, json={"detail": "no"}), "that is not a rankmesh: http://mesh.test/v1/rank"),
        (babble, "does not speak HTTP"),
    ],
)
def test_everything_else_is_unavailable_and_says_why(
    respond: Callable[[httpx.Request], httpx.Response], words: str
) -> None:
    with client(respond) as mesh, pytest.raises(StageUnavailableError) as caught:
        mesh.rank(REQUEST)
    assert words in caught.value.message


def test_a_mesh_without_samples_gives_an_empty_catalogue() -> None:
    with client(lambda _: httpx.Response(404, json={"detail": "Not Found"})) as mesh:
        assert mesh.samples() == {}
    with client(lambda _: httpx.Response(503, json={"detail": "x"})) as mesh, pytest.raises(StageUnavailableError):
        mesh.samples()
