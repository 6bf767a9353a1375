"""The API held to its own document: whatever the document allows or forbids, each answer is one it declares."""

from __future__ import annotations

import io
import json
from typing import Any

import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from services.ingress.config import IngressConfig
from services.ingress.http import create_app
from shared.clock import SystemClock
from shared.log import JsonLogger
from tests.helpers.fake_stations import FakeMesh

pytestmark = pytest.mark.slow

ELSEWHERE = (positive_data_acceptance, negative_data_rejection)
"""What is accepted or refused also depends on the deployment: the test of a mesh holds that."""

MESH = FakeMesh(IngressConfig(), SystemClock(), JsonLogger(stream=io.StringIO()))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(MESH.ingress))


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


@schemathesis.serializer("application/msgpack")
def pack(_: Any, value: Any) -> bytes:
    """Pack a generated body; what msgpack cannot say becomes a byte that is never msgpack."""
    try:
        # Through JSON's eyes, for which 7.0 is the integer 7: the schema cannot tell them apart, msgpack can.
        packed: bytes = msgpack.packb(json.loads(json.dumps(value), parse_float=_number))
    except (OverflowError, TypeError, ValueError):
        return b"\xc1"
    return packed


@schemathesis.deserializer("application/msgpack")
def unpack(_: Any, response: Any) -> Any:
    """Unpack an answer, to be validated against its schema."""
    return msgpack.unpackb(response.content)


@pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload media types")  # columns: tests/fuzz
@SCHEMA.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_declared(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=list(ELSEWHERE))
