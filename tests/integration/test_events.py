"""Appended events are in the very next request, once, in order, and never in a request of an earlier time."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from shared.schema.api import RankResponse

NOW_S = 1_700_000_000


@pytest.fixture
def user() -> str:
    """Return a user that no earlier run has seen: the store is persistent."""
    return f"events-{secrets.token_hex(6)}"


def event(user: str, number: int, timestamp_s: int) -> dict[str, Any]:
    return {
        "event_id": f"e-{number}",
        "user_id": user,
        "item_id": number + 1,
        "weight": 4.5,
        "timestamp_s": timestamp_s,
    }


def append(http: httpx.Client, *events: dict[str, Any]) -> dict[str, int]:
    response = http.post("/v1/events", json={"events": list(events)})
    assert response.status_code == 200, response.text
    counts: dict[str, int] = response.json()
    return counts


def rank(http: httpx.Client, user: str, timestamp_s: int) -> RankResponse:
    document = {"user_id": user, "candidates": [1, 2, 3, 4, 5], "timestamp_s": timestamp_s, "speculative": False}
    response = http.post("/v1/rank", json=document)
    assert response.status_code == 200, response.text
    answer = RankResponse.model_validate(response.json())
    assert answer.degraded == []
    return answer


def test_an_event_is_in_the_next_request_and_changes_its_scores(http: httpx.Client, user: str) -> None:
    before = rank(http, user, NOW_S)
    assert before.history_length == 0
    for number in range(3):
        counts = append(http, event(user, number, NOW_S - 100 + number))
        assert counts == {"appended": 1, "duplicates": 0, "expired": 0, "buffered": 0}
        assert rank(http, user, NOW_S).history_length == number + 1
    assert rank(http, user, NOW_S).candidates != before.candidates


def test_only_strictly_earlier_events_count(http: httpx.Client, user: str) -> None:
    append(http, event(user, 0, NOW_S - 1), event(user, 1, NOW_S), event(user, 2, NOW_S + 1))
    assert [rank(http, user, NOW_S + shift).history_length for shift in (-1, 0, 1, 2)] == [0, 1, 2, 3]


def test_the_same_event_id_is_kept_once(http: httpx.Client, user: str) -> None:
    one = event(user, 0, NOW_S - 5)
    assert append(http, one)["appended"] == 1
    assert append(http, one, event(user, 1, NOW_S - 4)) == {"appended": 1, "duplicates": 1, "expired": 0, "buffered": 0}
    assert rank(http, user, NOW_S).history_length == 2


def test_the_order_of_arrival_does_not_matter(http: httpx.Client, user: str) -> None:
    other = f"{user}-b"
    for number in (0, 1, 2):
        append(http, event(user, number, NOW_S - 50 + number))
    for number in (2, 0, 1):
        append(http, event(other, number, NOW_S - 50 + number))
    assert [row.scores for row in rank(http, user, NOW_S).candidates] == [
        row.scores for row in rank(http, other, NOW_S).candidates
    ]


def test_one_append_may_hold_several_users(http: httpx.Client, user: str) -> None:
    users = [f"{user}-{index}" for index in range(20)]
    assert append(http, *(event(each, 0, NOW_S - 9) for each in users))["appended"] == 20
    assert {rank(http, each, NOW_S).history_length for each in users} == {1}


def test_a_user_is_forgotten(http: httpx.Client, user: str) -> None:
    append(http, event(user, 0, NOW_S - 9), event(f"{user}-b", 0, NOW_S - 9))
    assert rank(http, user, NOW_S).history_length == 1
    for deleted in (True, False):
        response = http.delete(f"/v1/users/{user}/events")
        assert (response.status_code, response.json()) == (200, {"user_id": user, "deleted": deleted})
    assert [rank(http, each, NOW_S).history_length for each in (user, f"{user}-b")] == [0, 1]
    assert append(http, event(user, 0, NOW_S - 9))["appended"] == 1  # its ids are forgotten too
    assert rank(http, user, NOW_S).history_length == 1
