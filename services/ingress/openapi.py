"""The OpenAPI document, written from the schemas and from this deployment's own limits.

Bodies are parsed by hand (``body``), so FastAPI cannot derive the document; every status that a path can answer stands
here, and the fuzzing test holds the API to it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.ingress.auth import OPEN_PATHS
from services.ingress.body import JSON, MEDIA_TYPES
from services.ingress.config import IngressConfig
from services.ingress.directory import HealthBody, ModelsBody, ReadyBody, StatusBody
from services.ingress.routing import AUTO
from shared.hashing import ID_CHARS_MAX, ID_MAX
from shared.schema.api import (
    ApiLimits,
    ErrorBody,
    EventsRequest,
    EventsResponse,
    ForgetResponse,
    RankRequest,
    RankResponse,
)
from shared.wire import MEDIA_TYPE

Document = dict[str, Any]

API_VERSION = "1"

_SCHEMAS: tuple[type[BaseModel], ...] = (
    RankRequest, RankResponse, EventsRequest, EventsResponse, ForgetResponse, ErrorBody, HealthBody, ReadyBody,
    StatusBody, ModelsBody,
)  # fmt: skip

_REFUSALS = {
    "400": "The body is not valid JSON or msgpack.",
    "401": "No bearer token, or one that nobody has.",
    "403": "The token speaks for another tenant.",
    "406": "The client accepts neither JSON nor msgpack.",
    "408": "The body did not arrive in time.",
    "413": "The body is over the limit.",
    "415": "Another content type than the declared ones, or a content encoding other than zstd.",
    "422": "A field breaks a limit; the context names field, limit and value.",
    "429": "Shed at admission; Retry-After says when to come back.",
    "500": "An error that is not the client's.",
    "503": "A station that the answer cannot do without is out of reach.",
    "504": "The time budget went before there was any answer.",
}

_ACCESS = ("401", "403")

_INTEGER_ID = {"type": "integer", "minimum": 0, "maximum": ID_MAX}
_STRING_ID = {
    "type": "string",
    "minLength": 1,
    "description": "a decimal string is the same entity as its integer",
    "maxLength": ID_CHARS_MAX,
}
_ID = {
    "description": "64-bit id, echoed as it was sent",
    "anyOf": [{"$ref": "#/components/schemas/IntegerId"}, {"$ref": "#/components/schemas/StringId"}],
}


def openapi_document(config: IngressConfig, *, asks_for_token: bool = False) -> Document:
    """Return the document for one deployment.

    Args:
        config: The ingress.
        asks_for_token: Whether all but the probes ask for a bearer token.
    """
    schemas: Document = json.loads(_definitions())
    schemas |= {"IntegerId": _INTEGER_ID, "StringId": _STRING_ID, "Id": _ID}
    _apply_limits(schemas, config)
    document = _document(schemas)
    document["paths"]["/v1/rank"]["post"]["parameters"] = _rank_headers(config)
    if asks_for_token:
        _add_access(document)
    return document


@functools.cache
def _definitions() -> bytes:
    """Return the schemas of all bodies, JSON; the same for every deployment, and slow to derive."""
    _, definitions = models_json_schema(
        [(cls, "serialization" if cls.__name__.endswith(("Response", "Body")) else "validation") for cls in _SCHEMAS],
        ref_template="#/components/schemas/{model}",
    )
    return json.dumps(definitions["$defs"]).encode()


def _add_access(document: Document) -> None:
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values() if path not in OPEN_PATHS else ():
            operation["security"] = [{"bearer": []}]
            operation["responses"] |= {status: _refusal(status) for status in _ACCESS}


def _document(schemas: Document) -> Document:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rankmesh",
            "version": API_VERSION,
            "description": "Ranks the candidates of a user through a mesh of stations.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/rank": {
                "post": _post("rank", "Rank the candidates of one user", RankRequest, RankResponse, _example_rank())
            },
            "/v1/events": {
                "post": _post(
                    "append_events", "Append events to users' logs", EventsRequest, EventsResponse, _example_events()
                )
            },
            "/v1/users/{user_id}/events": {"delete": _forget()},
            "/v1/models": {"get": _get("models", "The models that this mesh ranks with", ModelsBody)},
            "/v1/status": {"get": _get("status", "Every deployment, replica and weights version", StatusBody)},
            "/v1/samples": {"get": _samples()},
            "/healthz": {"get": _get("healthz", "The process answers", HealthBody)},
            "/readyz": {"get": _get("readyz", "The mesh answers rank requests", ReadyBody, "503")},
            "/metrics": {"get": _metrics()},
        },
        "components": {"schemas": schemas},
    }


def _post(name: str, summary: str, body: type[BaseModel], answer: type[BaseModel], example: Document) -> Document:
    content: Document = {media: {"schema": _ref(body.__name__)} for media in MEDIA_TYPES}
    content[JSON]["example"] = example
    if body is RankRequest:
        content[MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary", "description": "docs/wire-format.md"}}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {media: {"schema": _ref(answer.__name__)} for media in MEDIA_TYPES},
            },
            **{status: _refusal(status) for status in _REFUSALS if status not in _ACCESS},
        },
    }


def _forget() -> Document:
    statuses = ("406", "422", "429", "500", "503", "504")
    return {
        "operationId": "forget_user",
        "summary": "Delete a user's events and profile",
        "parameters": [{"name": "user_id", "in": "path", "required": True, "schema": _ref("Id")}],
        "responses": {
            "200": {
                "description": "The user is forgotten.",
                "content": {media: {"schema": _ref(ForgetResponse.__name__)} for media in MEDIA_TYPES},
            },
            **{status: _refusal(status) for status in statuses},
        },
    }


def _get(name: str, summary: str, answer: type[BaseModel], *statuses: str) -> Document:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {JSON: {"schema": _ref(answer.__name__)}}},
            **{status: _refusal(status) for status in (*statuses, "500")},
        },
    }


def _samples() -> Document:
    return {
        "operationId": "samples",
        "summary": "A few held-out requests and the names of the items, where the weights bring them",
        "responses": {
            "200": {"description": "The samples.", "content": {JSON: {"schema": {"type": "object"}}}},
            "404": {"description": "These weights bring none.", "content": {JSON: {"schema": _ref("ErrorBody")}}},
        },
    }


def _metrics() -> Document:
    return {
        "operationId": "metrics",
        "summary": "Metrics of the answering ingress replica, Prometheus text format",
        "responses": {
            "200": {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
        },
    }


def _refusal(status: str) -> Document:
    answer: Document = {"description": _REFUSALS[status], "content": {JSON: {"schema": _ref("ErrorBody")}}}
    if status in ("429", "503"):
        answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
    if status == "401":
        answer["headers"] = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
    return answer


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _rank_headers(config: IngressConfig) -> list[Document]:
    limits = config.limits
    return [
        {
            "name": "X-Request-Timeout-Ms",
            "in": "header",
            "description": "how long the client waits; the smaller of this and deadline_ms is the budget",
            "schema": {"type": "integer", "minimum": limits.deadline_ms_min, "maximum": limits.deadline_ms_max},
        },
        {
            "name": "X-Tenant",
            "in": "header",
            "description": "who pays, as the network in front says; under load each tenant and surface has its share",
            "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{0,128}$"},
        },
    ]


def _candidates_schema(candidates_max: int) -> Document:
    """Say what makes candidates distinct: within one kind of id it is plain; across the two, 7 and "7" are one."""
    distinct = {"type": "array", "minItems": 1, "maxItems": candidates_max, "uniqueItems": True}
    return {
        "description": "distinct candidate ids; the two kinds may be mixed as long as no id occurs in both forms",
        "anyOf": [{**distinct, "items": _ref("IntegerId")}, {**distinct, "items": _ref("StringId")}],
    }


def _apply_limits(schemas: Document, config: IngressConfig) -> None:
    """Write the deployment's limits, which the classes cannot know, into the request schemas."""
    limits = config.limits
    rank = schemas["RankRequest"]["properties"]
    event = schemas["Event"]["properties"]
    rank["user_id"] = event["user_id"] = event["item_id"] = schemas["RankResponse"]["properties"]["user_id"] = _ref(
        "Id"
    )
    schemas["RankedCandidate"]["properties"]["id"] = _ref("Id")
    rank["candidates"] = _candidates_schema(limits.candidates_max)
    _close_features(rank["features"], schemas["WeightedIds"]["properties"], limits)
    _bounds(rank["limit"], maximum=limits.candidates_max)
    _bounds(rank["deadline_ms"], minimum=limits.deadline_ms_min, maximum=limits.deadline_ms_max)
    rank["tier"] = {
        "type": "string",
        "enum": [AUTO, *(tier.name for tier in config.tiers)],
        "default": AUTO,
        "description": rank["tier"]["description"],
    }
    _name_bounds(event["weight"])
    schemas["EventsRequest"]["properties"]["events"]["maxItems"] = limits.events_max


def _close_features(features: Document, weighted: Document, limits: ApiLimits) -> None:
    """Say of carried features what pydantic leaves open: names that do not match are refused, values are bounded."""
    (listed,) = (member for member in features["anyOf"] if member.get("type") == "array")
    listed["maxItems"] = limits.candidates_max
    each = listed["items"]
    ((pattern, value),) = each.pop("patternProperties").items()
    each["propertyNames"]["pattern"] = pattern
    each["additionalProperties"] = value
    each["maxProperties"] = limits.features_max
    number, ids, _ = value["oneOf"]
    _name_bounds(number)
    _name_bounds(weighted["weights"]["items"])
    ids["items"] = weighted["ids"]["items"] = _ref("Id")


def _name_bounds(schema: Document) -> None:
    """Turn a bounded union of number types into one bounded number; pydantic leaves its bounds as ``ge`` and ``le``."""
    schema.pop("anyOf", None)
    schema.update(type="number", minimum=schema.pop("ge"), maximum=schema.pop("le"))


def _bounds(schema: Document, **bounds: int) -> None:
    for member in schema.get("anyOf", [schema]):
        if member.get("type") == "integer":
            member.update(bounds)


def _example_rank() -> Document:
    return {"user_id": 6040, "candidates": [1, 2, 3], "limit": 2}


def _example_events() -> Document:
    return {
        "events": [{"event_id": "e-1", "user_id": 6040, "item_id": 1, "weight": 5, "timestamp_s": 1_000_000_000}],
    }
