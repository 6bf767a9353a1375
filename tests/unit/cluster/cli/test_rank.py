"""The request that a command line means, and the whole verb against a fake network."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import app, client
from cluster.cli.catalogue import Catalogue
from cluster.cli.rank import Query
from shared.schema.api import RankResponse
from tests.helpers.mesh_answers import NUM_CANDIDATES, answer, catalogue


def query(user: int | str = 6040, **changes: Any) -> Query:
    fields: dict[str, Any] = {"candidates": None, "num": 500, "timestamp_s": None, "tier": "auto", "deadline_ms": None}
    return Query.of(catalogue(), user, **{**fields, **changes})


def test_a_sample_user_gets_the_sample_request_filled_up() -> None:
    found = query()
    sample = catalogue().samples[0]
    assert found.sample == sample
    assert tuple(found.request.candidates[:NUM_CANDIDATES]) == sample.candidates
    assert len(found.request.candidates) == found.request.limit == 60  # the whole catalogue, 500 were asked
    assert (found.request.timestamp_s, found.request.surface) == (sample.timestamp_s, "ml-1m")
    assert found.next_ratings == {4: 5.0, 33: 2.0}
    assert query(num=10).next_ratings == {4: 5.0}


def test_another_user_gets_a_draw_and_asks_now() -> None:
    found = query("abc", num=7)
    assert found.sample is None
    assert found.next_ratings == {}
    assert len(found.request.candidates) == 7
    assert found.request.timestamp_s is None  # the mesh's own clock says when


def test_what_is_given_wins() -> None:
    found = query(candidates=[3, "x"], timestamp_s=5, tier="light", deadline_ms=20)
    assert (found.request.candidates, found.request.timestamp_s) == ([3, "x"], 5)
    assert (found.request.tier, found.request.deadline_ms, found.request.limit) == ("light", 20, 2)
    assert found.sample is None


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"tier": "no such tier"}, "--tier"),
        ({"candidates": [2**63]}, "--candidates"),
        ({"candidates": [1], "deadline_ms": 0}, "--deadline-ms"),
        ({"user": ""}, "'--user'"),
        ({"timestamp_s": 2**41}, "'--at'"),
    ],
)
def test_a_value_that_the_api_would_refuse_names_its_option(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        query(**changes)
    assert option in caught.value.format_message()


def test_without_a_catalogue_candidates_must_be_named() -> None:
    with pytest.raises(typer.BadParameter, match="name the candidates"):
        Query.of(Catalogue(), 1, None, 5, None, "auto", None)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Answer every client from memory; returns what was asked."""
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        body = {"/v1/samples": catalogue().model_dump(mode="json"), "/v1/rank": answer()}
        return httpx.Response(200, json=body[request.url.path])

    class FakeNetClient(client.Client):
        def __init__(self, url: str) -> None:
            super().__init__(url, transport=httpx.MockTransport(respond))

    monkeypatch.setattr(client, "Client", FakeNetClient)
    return asked


def test_the_verb_draws_titles_findings_verdict_and_waterfall(network: list[httpx.Request]) -> None:
    result = CliRunner().invoke(app, ["rank", "--user", "6040", "--url", "http://mesh.test", "--rows", "5"])
    assert result.exit_code == 0, result.output
    for expected in ("user 6040", "Film 1 (1901)", "places 4, 33", "3 exact", "ranking:full", "20.0 ms"):
        assert expected in result.output
    assert [request.url.path for request in network] == ["/v1/samples", "/v1/rank"]


@pytest.mark.usefixtures("network")
def test_json_is_the_answer_and_nothing_else() -> None:
    result = CliRunner().invoke(app, ["rank", "--user", "6040", "--url", "http://mesh.test", "--json"])
    assert result.exit_code == 0
    assert RankResponse.model_validate(json.loads(result.output)).total_ms == 20.0
