"""Events on the command line: one, or JSON lines."""

from __future__ import annotations

import io
import json

import httpx
import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import app, client
from cluster.cli.events import BATCH, LINE_BYTES_MAX, one_event, parse_lines
from shared.errors import InvalidRequestError

LINE = {"event_id": "e1", "user_id": 6040, "item_id": 260, "weight": 5, "timestamp_s": 978300000}


def test_the_same_event_always_gets_the_same_id() -> None:
    first = one_event("6040", "260", 5.0, 978_300_000, None)
    assert first == one_event("6040", "260", 5.0, 978_300_000, None)
    others = [
        one_event("6041", "260", 5.0, 978_300_000, None),
        one_event("6040", "261", 5.0, 978_300_000, None),
        one_event("6040", "260", 4.0, 978_300_000, None),
        one_event("6040", "260", 5.0, 978_300_001, None),
    ]
    assert len({first.event_id, *(other.event_id for other in others)}) == 5
    assert (first.user_id, first.item_id) == (6040, 260)
    assert one_event("6040", "abc", 5.0, 0, "mine").event_id == "mine"


def test_without_a_time_it_happened_now() -> None:
    assert one_event("1", "2", 3.0, None, None).timestamp_s > 1_700_000_000


@pytest.mark.parametrize(("event_id", "at", "option"), [("two words", 1, "--id"), (None, 2**41, "--at")])
def test_a_value_over_a_limit_names_its_option(event_id: str | None, at: int, option: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        one_event("1", "2", 3.0, at, event_id)
    assert option in caught.value.format_message()


def test_lines_are_events_and_empty_lines_are_not() -> None:
    text = f"{json.dumps(LINE)}\n\n{json.dumps({**LINE, 'event_id': 'e2'})}"
    assert [event.event_id for event in parse_lines(io.StringIO(text), "f")] == ["e1", "e2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Invalid JSON"),
        (json.dumps({**LINE, "weight": -1}), "line 2: weight must be at least 0, is -1"),
        (json.dumps({**LINE, "novelty": 1}), "line 2: novelty is not a field"),
        (json.dumps({key: LINE[key] for key in LINE if key != "item_id"}), "line 2: item_id is missing"),
        ("x" * (LINE_BYTES_MAX + 1), f"line 2: longer than {LINE_BYTES_MAX}"),
    ],
)
def test_a_bad_line_is_named_and_the_lines_before_it_count(line: str, words: str) -> None:
    found = parse_lines(io.StringIO(f"{json.dumps(LINE)}\n{line}\n"), "events.jsonl")
    assert next(found).event_id == "e1"
    with pytest.raises(InvalidRequestError) as caught:
        next(found)
    assert caught.value.message.startswith("events.jsonl, ")
    assert words in caught.value.message


def test_a_line_of_the_longest_length_is_read() -> None:
    line = json.dumps(LINE)
    padded = line + " " * (LINE_BYTES_MAX - len(line) - 1) + "\n"
    assert len(list(parse_lines(io.StringIO(padded * 2), "f"))) == 2


def test_the_verb_adds_up_what_became_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sizes.append(len(json.loads(request.content)["events"]))
        return httpx.Response(200, json={"appended": sizes[-1] - 1, "duplicates": 1, "expired": 0, "buffered": 0})

    class FakeNetClient(client.Client):
        def __init__(self, url: str) -> None:
            super().__init__(url, transport=httpx.MockTransport(respond))

    monkeypatch.setattr(client, "Client", FakeNetClient)
    lines = "\n".join(json.dumps({**LINE, "event_id": f"e{number}"}) for number in range(BATCH + 1))
    result = CliRunner().invoke(app, ["events", "--file", "-", "--url", "http://mesh.test"], input=lines)
    assert result.exit_code == 0, result.output
    assert sizes == [BATCH, 1]
    assert result.output.strip() == f"{BATCH - 1} appended, 2 there already"


@pytest.mark.parametrize(("deleted", "words"), [(True, "events and profile are deleted"), (False, "nothing to delete")])
def test_a_user_is_deleted_by_a_verb_of_its_own(monkeypatch: pytest.MonkeyPatch, deleted: bool, words: str) -> None:
    seen: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json={"user_id": "a/b", "deleted": deleted})

    class FakeNetClient(client.Client):
        def __init__(self, url: str) -> None:
            super().__init__(url, transport=httpx.MockTransport(respond))

    monkeypatch.setattr(client, "Client", FakeNetClient)
    arguments = ["events", "delete", "--user", "a/b", "--url", "http://mesh.test"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert words in result.output
    assert seen == ["DELETE /v1/users/a%2Fb/events"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(result.output) == {"user_id": "a/b", "deleted": deleted}


@pytest.mark.parametrize(
    ("option", "value"),
    [("--user", "7"), ("--name", "other"), ("--port", "8471"), ("--url", "http://x"), ("--at", "5"), ("--source", "s")],
)
def test_options_before_delete_are_not_dropped(option: str, value: str) -> None:
    """A name that is dropped would leave the deletion to another mesh."""
    result = CliRunner().invoke(app, ["events", option, value, "delete", "--user", "8"])
    assert result.exit_code == 2
    assert "go after delete" in result.output
    assert option in result.output


def test_a_time_that_the_mesh_refuses_is_told_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "code": "invalid_request",
        "message": "events.0.timestamp_s must be at most 978300000, 86400 s ahead of now, is 32503680000",
        "context": {"field": "events.0.timestamp_s", "limit": 978_300_000, "value": "32503680000"},
    }

    class FakeNetClient(client.Client):
        def __init__(self, url: str) -> None:
            super().__init__(url, transport=httpx.MockTransport(lambda _: httpx.Response(422, json=body)))

    monkeypatch.setattr(client, "Client", FakeNetClient)
    event = ["events", "--user", "1", "--item", "2", "--url", "http://mesh.test"]
    result = CliRunner().invoke(app, [*event, "--at", "3000-01-01"])
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert "3000-01-01 is too far ahead: this mesh takes events up to 2000-12-31 22:00:00" in words
    assert "32503680000" in CliRunner().invoke(app, event).output
