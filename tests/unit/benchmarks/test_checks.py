from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cases import Case
from benchmarks.checks import echo_faults, number_faults, stage_fault
from shared.schema.api import RankedCandidate, RankResponse, StageTime
from shared.schema.user import UserHistory

CASE = Case("c", "empty", None, "u", [1, 2, "x"], 1, "ml-1m", 100, UserHistory.empty())
REQUEST = CASE.request("r", speculative=False, tier="auto", deadline_ms=1000, limit=None)


def candidate(id_: int | str, click: float = 0.5, conversion: float = 0.25, value: float = 0.75) -> RankedCandidate:
    scores = {"click": click, "conversion": conversion}
    return RankedCandidate.model_construct(id=id_, scores=scores, value=value, scored_by="full", speculative="none")


def response(**fields: Any) -> RankResponse:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "user_id": "u",
        "candidates": [candidate("x"), candidate(1), candidate(2)],
        "num_candidates": 3,
        "history_length": 0,
        "stages": [],
        "total_ms": 10.0,
    }
    return RankResponse.model_construct(**{**defaults, **fields})


def test_a_true_echo_has_no_fault() -> None:
    assert echo_faults(REQUEST, response(), 100, 0) == []
    assert echo_faults(REQUEST, response(candidates=[candidate(2)]), 1, 0) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"request_id": "other"}, "request_id"),
        ({"user_id": 5}, "user_id"),
        ({"num_candidates": 2}, "num_candidates"),
        ({"candidates": [candidate(1), candidate(2)]}, "2 candidates returned, 3 expected"),
        ({"candidates": [candidate(1), candidate(2), candidate(2)]}, "twice"),
        ({"candidates": [candidate(1), candidate("2"), candidate("x")]}, "not sent in that form"),
        ({"history_length": 4}, "history_length"),
    ],
)
def test_every_broken_echo_is_named(fields: dict[str, Any], words: str) -> None:
    faults = echo_faults(REQUEST, response(**fields), 100, 0)
    assert any(words in fault for fault in faults)


def test_a_history_that_nobody_can_know_is_not_checked() -> None:
    assert echo_faults(REQUEST, response(history_length=4), 100, None) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (candidate(1, value=float("nan")), "nan"),
        (candidate(1, click=float("inf")), "inf"),
        (candidate(1, click=1.5), "outside"),
        (candidate(1, click=0.2, conversion=0.3), "converts more"),
    ],
)
def test_numbers_that_are_no_probabilities_are_named(bad: RankedCandidate, words: str) -> None:
    assert number_faults(response()) == []
    (fault,) = number_faults(response(candidates=[candidate(2), bad]))
    assert words in fault


def bar(duration_ms: float, *, critical: bool = True) -> StageTime:
    return StageTime(name="s", start_ms=0, duration_ms=duration_ms, critical=critical)


def test_critical_stages_must_add_up_to_the_total() -> None:
    assert stage_fault(response(stages=[bar(4), bar(5), bar(99, critical=False)], total_ms=10.0)) is None
    fault = stage_fault(response(stages=[bar(4), bar(4)], total_ms=10.0))
    assert fault == "critical stages add up to 8.00 ms of 10.00 ms"
    assert stage_fault(response(stages=[bar(0.2)], total_ms=1.0)) is None, "a millisecond of slack for tiny answers"
