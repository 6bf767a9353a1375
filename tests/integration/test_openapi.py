"""Fuzzing: whatever the document allows is answered as the document says, and what it forbids is refused; no 5xx."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.chaos.world import world_dataset
from benchmarks.site import Site
from shared.hashing import canonical_id

OPERATIONS = [
    ("POST", "/v1/rank"),
    ("POST", "/v1/events"),
    ("DELETE", "/v1/users/{user_id}/events"),
    ("GET", "/v1/models"),
    ("GET", "/v1/status"),
    ("GET", "/v1/samples"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]
MODES = {
    "POST": (GenerationMode.POSITIVE, GenerationMode.NEGATIVE),
    "DELETE": (GenerationMode.POSITIVE,),
    "GET": (GenerationMode.POSITIVE,),
}
CASES = [(method, path, mode) for method, path in OPERATIONS for mode in MODES[method]]
# A view takes nothing: there is nothing to vary, and nothing that could be wrong.
EXAMPLES = {"POST": 60, "DELETE": 20, "GET": 1}

NOW_S = int(time.time())

CARRIED = "genres"
"""A feature of the model whose values are ids."""

BUDGET_MS_MIN = 3_000
"""A budget from which on a request of the fuzzer must be answered, also on a busy machine."""


@pytest.fixture(scope="module")
def api(site: Site) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{site.url}/openapi.json")


def test_every_operation_is_fuzzed(api: schemathesis.BaseSchema) -> None:
    documented = {(method.upper(), path) for path, methods in api.raw_schema["paths"].items() for method in methods}
    assert documented == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=[f"{m} {path} {mode.value}" for m, path, mode in CASES])
def test_the_api_keeps_its_document(api: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES[method],
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case[Any]) -> None:
        body: Any = case.body
        _spare_the_world(case)
        if mode is GenerationMode.POSITIVE:
            _keep_what_no_schema_can_say(body)
        response = case.call_and_validate(checks=CHECKS, timeout=30)
        statuses[response.status_code] += 1
        if response.status_code >= 500:  # the one that a client can ask for: a budget that is too small
            assert response.status_code == 504
            assert body["deadline_ms"] < BUDGET_MS_MIN

    fuzz()
    wanted = 200 if mode is GenerationMode.POSITIVE else 422
    assert statuses[wanted] > 0 or path == "/v1/samples", statuses


def _spare_the_world(case: schemathesis.Case[Any]) -> None:
    """Move what is generated from users of the world, whose histories other tests know, to users that nobody knows."""
    body: Any = case.body
    events = body.get("events") if isinstance(body, dict) else None
    for event in events if isinstance(events, list) else []:
        if isinstance(event, dict) and "user_id" in event:
            event["user_id"] = _spared(event["user_id"])
    if "user_id" in (case.path_parameters or {}):
        case.path_parameters["user_id"] = _spared(case.path_parameters["user_id"])


def _spared(user: Any) -> Any:
    user = int(user) if isinstance(user, float) and user.is_integer() else user
    number = canonical_id(user) if isinstance(user, int | str) and not isinstance(user, bool) else None
    if isinstance(number, int) and 0 <= number <= int(world_dataset().users.user_id[-1]):
        return f"{number + 10**12}" if isinstance(user, str) else number + 10**12
    return user


def _keep_what_no_schema_can_say(body: Any) -> None:
    """Change what the schema allows and this deployment does not.

    Sources are its own names, no event is of the far future, and features are one map a candidate, whose names are the
    model's and whose ids have a weight each, if any. A request without a budget gets one that a busy machine can keep.
    """
    if not isinstance(body, dict):
        return
    if "candidates" in body:
        body.setdefault("deadline_ms", BUDGET_MS_MIN)
    for event in body.get("events") or []:
        event.pop("source", None)
        if event["timestamp_s"] > NOW_S:
            event["timestamp_s"] %= NOW_S
    features = body.get("features")
    if features is not None:
        count = len(body["candidates"])
        body["features"] = [_of_the_model(each) for each in [*features, *({} for _ in range(count))][:count]]


def _of_the_model(features: dict[str, Any]) -> dict[str, Any]:
    """Keep one list of ids, with or without weights, under the name of a feature that the model has."""
    for value in features.values():
        if isinstance(value, dict):
            weights = [*value["weights"], *(1.0 for _ in value["ids"])][: len(value["ids"])]
            return {CARRIED: {**value, "weights": weights}}
        if isinstance(value, list):
            return {CARRIED: value}
    return {}
