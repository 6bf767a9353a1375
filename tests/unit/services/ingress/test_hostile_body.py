"""A body is refused at its first faults: a small one must not buy seconds of an ingress."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zstandard
from pydantic import ValidationError

from services.ingress import body
from services.ingress.body import JSON, OBJECT_NAMES_MAX
from services.ingress.question import RankQuestion
from shared.errors import InvalidRequestError, MalformedBodyError, PayloadTooLargeError
from shared.schema.api import ApiLimits, EventsRequest, RankRequest

RANK: dict[str, Any] = {"user_id": 1, "candidates": [1]}
ERRORS_MAX = 2 * OBJECT_NAMES_MAX
"""All errors that validation may collect: each costs microseconds, and only the first is told."""


def parse(document: dict[str, Any]) -> RankQuestion:
    return RankQuestion.parse(json.dumps(document).encode(), JSON, ApiLimits())


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (RANK | {"candidates": [None] * 9_000}, "candidates.0"),
        (RANK | {"features": [{"genres": [None] * 9_000}]}, "features.0.genres.0"),
        (RANK | {"features": [{f"f{n}": [None] * 100 for n in range(100)}]}, "features.0.f0.0"),
        (RANK | {"features": [{"f": {f"x{n}": 0 for n in range(1_000)}}]}, "features.0.f"),
        (RANK | {"features": [{"f": {"ids": [None] * 5_000, "weights": [None] * 5_000}}]}, "features.0.f.ids.0"),
        (RANK | {"features": [{f"f{n}": {f"x{m}": 0 for m in range(50)} for n in range(200)}]}, "features.0.f0"),
        (RANK | {"features": [None] * 9_000}, "features.0"),
        (RANK | {f"x{n}": 0 for n in range(1_000)}, "x0"),
    ],
)
def test_few_errors_are_collected_of_many(document: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(document)
    assert caught.value.context["field"] == field
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= ERRORS_MAX


def test_few_errors_are_collected_of_many_events() -> None:
    for event in ({}, {f"x{n}": 0 for n in range(14)}):
        with pytest.raises(InvalidRequestError) as caught:
            body.validate(EventsRequest, {"events": [event] * 9_000})
        assert isinstance(caught.value.__cause__, ValidationError)
        assert caught.value.__cause__.error_count() <= ERRORS_MAX


@pytest.mark.parametrize(("num_rows", "names_each"), [(2, 33), (200, 100), (800, 100)])
def test_features_of_other_names_in_each_candidate_are_refused_before_columns_are_made_of_them(
    num_rows: int, names_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ingress.question.columns_of", lambda rows: pytest.fail("a column for each name"))
    rows = [{f"f{row}_{n}": 1 for n in range(names_each)} for row in range(num_rows)]
    with pytest.raises(InvalidRequestError) as caught:
        parse(RANK | {"candidates": [*range(num_rows)], "features": rows})
    assert caught.value.context == {"field": "features", "limit": 64, "value": num_rows * names_each}


@pytest.mark.parametrize("count", [OBJECT_NAMES_MAX + 1, 20_000])
def test_an_object_has_so_many_names_and_no_more(count: int) -> None:
    with pytest.raises(MalformedBodyError) as caught:
        parse(RANK | {f"x{n}": 0 for n in range(count - len(RANK))})
    assert caught.value.context == {"field": "body", "limit": OBJECT_NAMES_MAX, "value": count}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (1e300, "features.0.genres"),
        (True, "features.0.genres"),
        ("a", "features.0.genres"),
        (None, "features.0.genres"),
        ([1, True], "features.0.genres.1"),
        ([1] * 10_001, "features.0.genres"),
        ({"ids": [1, 2], "weights": [1e300, 1]}, "features.0.genres.weights.0"),
        ({"ids": [1], "weights": [1.0], "x": 1}, "features.0.genres.x"),
        ({"ids": [1]}, "features.0.genres.weights"),
    ],
)
def test_a_wrong_feature_is_named_without_the_inside_of_the_server(value: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(RANK | {"features": [{"genres": value}]})
    assert caught.value.context["field"] == field
    assert not any(inside in caught.value.message for inside in ("function", " at 0x", "<", "pydantic"))


@pytest.mark.parametrize(
    ("changes", "message", "limit", "value"),
    [
        ({"candidates": []}, "candidates must have at least 1 entry, has 0", 1, "list of 0"),
        ({"limit": 0}, "limit must be at least 1, is 0", 1, "0"),
        ({"user_id": -1}, f"user_id: integer id must be from 0 to {2**63 - 1}, is -1", None, "-1"),
        ({"tier": "no such"}, "tier must match ^[A-Za-z0-9][A-Za-z0-9_.-]*$, is no such", None, "no such"),
        ({"novelty": 1}, "novelty is not a field", "known fields", "1"),
        ({"limit": "5"}, "limit must be an integer, is the text 5", None, "5"),
    ],
)
def test_the_rule_is_told_in_plain_words(changes: dict[str, Any], message: str, limit: object, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        body.validate(RankRequest, {"user_id": 1, "candidates": [1], **changes})
    assert (caught.value.message, caught.value.context["value"]) == (message, value)
    assert limit in (None, caught.value.context["limit"])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("5", "must be a number, is the text 5"),
        (True, "must be a number, is True"),
        (None, "must be a number, is None"),
    ],
)
def test_a_number_that_is_none_is_told_so_once(weight: object, message: str) -> None:
    event = {"event_id": "e", "user_id": 1, "item_id": 1, "weight": weight, "timestamp_s": 1}
    with pytest.raises(InvalidRequestError) as caught:
        body.validate(EventsRequest, {"events": [event]})
    assert caught.value.message == f"events.0.weight {message}"


async def plain(content: bytes, bytes_max: int = 10_000) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        yield content

    return await body.read_body(chunks(), {"content-encoding": "zstd"}, bytes_max, 10.0)


FRAME = zstandard.ZstdCompressor(write_checksum=True).compress(b"{}" * 100)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (FRAME + b"junk", "4 bytes follow"),
        (FRAME + FRAME, "bytes follow"),
        (FRAME[:-1], "cut off"),
        (FRAME[:-4], "cut off"),
        (FRAME[:4], "cut off"),
        (b"", "cut off"),
    ],
)
async def test_a_compressed_body_is_one_whole_frame(content: bytes, why: str) -> None:
    with pytest.raises(MalformedBodyError, match=why):
        await plain(content)


async def test_a_frame_is_read_up_to_the_limit() -> None:
    assert await plain(FRAME, 200) == b"{}" * 100
    with pytest.raises(PayloadTooLargeError):
        await plain(FRAME, 199)
