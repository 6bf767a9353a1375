from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.routing import APIRoute

from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from services.ingress.openapi import openapi_document
from shared.schema.api import ApiLimits
from tests.helpers.fake_stations import FakeMesh

LIMITS = ApiLimits(candidates_max=17, events_max=5, deadline_ms_min=60, deadline_ms_max=1_900)
DOCUMENT = openapi_document(IngressConfig(limits=LIMITS))


def test_every_route_is_documented_and_nothing_else() -> None:
    app = create_app(FakeMesh().ingress)
    routes = {
        (route.path.replace(":path", ""), method.lower())  # a converter is no part of the documented path
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }

    documented = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}

    assert documented == routes


def test_the_limits_of_the_deployment_stand_in_the_document() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    rank = schemas["RankRequest"]["properties"]

    assert {kind["maxItems"] for kind in rank["candidates"]["anyOf"]} == {17}
    assert bounds(rank["deadline_ms"]) == (60, 1_900)
    assert bounds(rank["limit"]) == (1, 17)
    assert rank["tier"]["enum"] == ["auto", "full", "light"]
    assert schemas["EventsRequest"]["properties"]["events"]["maxItems"] == 5


def test_the_document_says_of_carried_features_what_is_refused() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    (listed,) = (kind for kind in schemas["RankRequest"]["properties"]["features"]["anyOf"] if kind["type"] == "array")
    each = listed["items"]
    assert listed["maxItems"] == 17
    assert "patternProperties" not in each  # it would let any other name through
    name = re.compile(each["propertyNames"]["pattern"])
    assert name.search("price")
    assert not name.search("\u00a8")
    number, ids, weighted = each["additionalProperties"]["oneOf"]
    assert number == {"type": "number", "minimum": -3e38, "maximum": 3e38}
    assert ids["items"] == {"$ref": "#/components/schemas/Id"}
    assert weighted == {"$ref": "#/components/schemas/WeightedIds"}
    weights = schemas["WeightedIds"]["properties"]["weights"]["items"]
    assert (weights["minimum"], weights["maximum"]) == (-3e38, 3e38)


def test_both_media_types_are_declared_for_requests_and_answers() -> None:
    for path in ("/v1/rank", "/v1/events"):
        operation = DOCUMENT["paths"][path]["post"]
        both = {"application/json", "application/msgpack"}
        columns = {"application/vnd.rankmesh.columns"} if path == "/v1/rank" else set()
        assert set(operation["requestBody"]["content"]) == both | columns
        assert set(operation["responses"]["200"]["content"]) == both


@pytest.mark.parametrize("status", ["400", "406", "408", "413", "415", "422", "429", "500", "503", "504"])
def test_every_refusal_has_the_error_body(status: str) -> None:
    answer = DOCUMENT["paths"]["/v1/rank"]["post"]["responses"][status]
    assert answer["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    assert ("Retry-After" in answer.get("headers", {})) == (status in ("429", "503"))


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for reference in references(DOCUMENT):
        assert reference.removeprefix("#/components/schemas/") in schemas


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for child in node.values() for found in references(child)]
    if isinstance(node, list):
        return [found for child in node for found in references(child)]
    return []


def bounds(schema: dict[str, Any]) -> tuple[int, int]:
    number = next(member for member in schema["anyOf"] if member.get("type") == "integer")
    return number["minimum"], number["maximum"]
