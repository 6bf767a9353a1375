"""What crosses the trust border: every field's limit, at it and one over."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.hashing import ID_CHARS_MAX, ID_MAX
from shared.schema.api import (
    CANDIDATES_CEILING,
    TIMESTAMP_MAX_S,
    ApiLimits,
    ErrorBody,
    Event,
    EventsRequest,
    EventsResponse,
    RankRequest,
    RankResponse,
    StageTime,
)

RANK: dict[str, Any] = {"user_id": 1, "candidates": [1, 2]}
EVENT: dict[str, Any] = {"event_id": "e", "user_id": 1, "item_id": 2, "weight": 4.5, "timestamp_s": 3}


def refused(model: type[RankRequest | Event | EventsRequest], body: dict[str, Any]) -> str:
    """Return the dotted name of the first wrong field, the same from Python values and from JSON."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return ".".join(str(part) for part in caught.value.errors()[0]["loc"])


def test_a_small_request_gets_its_defaults() -> None:
    request = RankRequest.model_validate(RANK)
    assert request.surface == "ml-1m"
    assert request.tier == "auto"
    assert request.speculative is True
    assert (request.limit, request.timestamp_s, request.deadline_ms, request.request_id) == (None, None, None, None)
    assert RankRequest.model_validate_json(json.dumps(RANK)) == request


@pytest.mark.parametrize("value", [0, 1, ID_MAX, "a", "0", "ä" * ID_CHARS_MAX, "x" * ID_CHARS_MAX, " ", "\n", "a\x00"])
def test_ids_that_are_ids(value: int | str) -> None:
    request = RankRequest.model_validate({**RANK, "user_id": value, "candidates": [value]})
    assert request.user_id == value
    assert type(request.user_id) is type(value)  # echoed as it was sent
    assert request.candidates == [value]


@pytest.mark.parametrize(
    "value",
    [
        -1,
        ID_MAX + 1,
        2**64,
        10**40,
        "",
        "x" * (ID_CHARS_MAX + 1),
        "ä" * (ID_CHARS_MAX + 1),
        "\ud800",
        True,
        False,
        None,
        1.0,
        1.5,
        float("nan"),
        float("inf"),
        [1],
        {"id": 1},
        b"x",
    ],
)
def test_ids_that_are_none(value: object) -> None:
    assert refused(RankRequest, {**RANK, "user_id": value}).startswith("user_id")
    assert refused(RankRequest, {**RANK, "candidates": [1, value]}).startswith("candidates.1")
    assert refused(Event, {**EVENT, "item_id": value}).startswith("item_id")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidates", [1] * CANDIDATES_CEILING),
        ("limit", 1),
        ("limit", CANDIDATES_CEILING),
        ("timestamp_s", 0),
        ("timestamp_s", TIMESTAMP_MAX_S),
        ("deadline_ms", 1),
        ("surface", "A-1_b.c"),
        ("surface", "x" * 64),
        ("tier", "full"),
        ("request_id", "x" * 128),
        ("request_id", "!~"),
        ("speculative", False),
    ],
)
def test_values_at_their_limit(field: str, value: object) -> None:
    assert getattr(RankRequest.model_validate({**RANK, field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidates", []),
        ("candidates", [1] * (CANDIDATES_CEILING + 1)),
        ("candidates", "12"),
        ("candidates", {"0": 1}),
        ("candidates", None),
        ("limit", 0),
        ("limit", CANDIDATES_CEILING + 1),
        ("limit", 1.0),
        ("limit", "1"),
        ("limit", True),
        ("timestamp_s", -1),
        ("timestamp_s", TIMESTAMP_MAX_S + 1),
        ("timestamp_s", 1.5),
        ("deadline_ms", 0),
        ("deadline_ms", "50"),
        ("surface", ""),
        ("surface", "x" * 65),
        ("surface", "a b"),
        ("surface", "a\n"),
        ("surface", "-a"),
        ("surface", "é"),
        ("tier", None),
        ("request_id", ""),
        ("request_id", "x" * 129),
        ("request_id", "a b"),
        ("request_id", "a\n"),
        ("request_id", "é"),
        ("speculative", 1),
        ("speculative", "yes"),
        ("unknown", 1),
    ],
)
def test_values_beyond_their_limit(field: str, value: object) -> None:
    assert refused(RankRequest, {**RANK, field: value}).startswith(field)


@pytest.mark.parametrize("field", ["user_id", "candidates"])
def test_a_missing_field_is_named(field: str) -> None:
    assert refused(RankRequest, {name: value for name, value in RANK.items() if name != field}) == field


@pytest.mark.parametrize(
    ("field", "value"), [("weight", 0), ("weight", 1e6), ("timestamp_s", 0), ("timestamp_s", TIMESTAMP_MAX_S)]
)
def test_event_values_at_their_limit(field: str, value: float) -> None:
    assert getattr(Event.model_validate({**EVENT, field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", -0.001),
        ("weight", 1_000_000.1),
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("weight", "4.5"),
        ("weight", True),
        ("weight", None),
        ("timestamp_s", -1),
        ("timestamp_s", TIMESTAMP_MAX_S + 1),
        ("event_id", ""),
        ("event_id", 7),
        ("event_id", "x" * 129),
        ("event_id", "a b"),
        ("extra", 1),
    ],
)
def test_event_values_beyond_their_limit(field: str, value: object) -> None:
    assert refused(Event, {**EVENT, field: value}).startswith(field)


def test_the_number_of_events() -> None:
    assert len(EventsRequest.model_validate({"events": [EVENT] * 10_000}).events) == 10_000
    assert refused(EventsRequest, {"events": [EVENT] * 10_001}) == "events"
    assert refused(EventsRequest, {"events": []}) == "events"
    assert refused(EventsRequest, {"events": [EVENT, {**EVENT, "weight": -1}]}).startswith("events.1.weight")


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=20,
    )
)
def test_no_body_fails_otherwise_than_by_a_validation_error(body: object) -> None:
    for model in (RankRequest, EventsRequest):
        for candidate in (body, {**RANK, "candidates": body}, {"events": body}):
            try:
                model.model_validate(candidate)
            except ValidationError:
                continue


def test_answers_survive_json() -> None:
    response = RankResponse.model_validate(
        {
            "request_id": "r",
            "user_id": "u",
            "weights_version": "v",
            "tier": "full",
            "tier_reason": "budget",
            "candidates": [
                {"id": 1, "scores": {"click": 0.5}, "value": 0.5, "scored_by": "full", "speculative": "none"}
            ],
            "num_candidates": 1,
            "history_length": 0,
            "degraded": ["embedding:1"],
            "reasons": {"embedding:1": "no live replica"},
            "num_oov": {"item_id": 0},
            "stages": [StageTime(name="admission", start_ms=0, duration_ms=1)],
            "total_ms": 1.0,
        }
    )
    assert RankResponse.model_validate_json(response.model_dump_json()) == response
    assert response.stages[0].critical is False
    assert EventsResponse(appended=1, duplicates=2, expired=4, buffered=3).model_dump() == {
        "appended": 1,
        "duplicates": 2,
        "expired": 4,
        "buffered": 3,
    }
    assert ErrorBody(code="x", message="y", context={"limit": 1, "value": None}).context["value"] is None


def test_the_limits_of_a_deployment_must_agree() -> None:
    assert ApiLimits().deadline_ms_default == 1_000
    ApiLimits(deadline_ms_min=5, deadline_ms_max=5, deadline_ms_default=5)
    for wrong in (
        {"deadline_ms_min": 2_000},
        {"deadline_ms_default": 10_001},
        {"deadline_ms_min": 20_000, "deadline_ms_default": 20_000},
        {"candidates_max": CANDIDATES_CEILING + 1},
        {"candidates_max": 0},
    ):
        with pytest.raises(ValidationError):
            ApiLimits.model_validate(wrong)
