"""A client of a mesh's HTTP API that never raises for what the mesh does: every request ends in an ``Answer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import httpx
import msgpack
import orjson
from pydantic import BaseModel, ValidationError

from cluster.access import access
from shared.clock import Clock
from shared.schema.api import ErrorBody, EventsRequest, EventsResponse, RankRequest, RankResponse

Wire: TypeAlias = Literal["json", "msgpack"]
Outcome: TypeAlias = Literal[
    "ok", "degraded", "shed", "deadline", "unavailable", "failed", "rejected", "broken", "hung", "garbled"
]

WIRES: tuple[Wire, ...] = ("json", "msgpack")
CONTENT_TYPES: dict[Wire, str] = {"json": "application/json", "msgpack": "application/msgpack"}

SHED_MAX = 10
"""Refusals of one request after which a client that is in no hurry gives up."""

_STATUS_OUTCOMES: dict[int, Outcome] = {429: "shed", 503: "unavailable", 504: "deadline"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one rank request.

    Args:
        outcome: ``ok``: whole answer; ``degraded``: marked answer; ``shed`` 429, ``deadline`` 504, ``unavailable`` 503,
            ``failed`` any other 5xx, ``rejected`` any other 4xx; ``broken``: the connection broke or was refused;
            ``hung``: no answer within the client's time limit; ``garbled``: 2xx with a body that is no RankResponse.
        status: HTTP status, 0 when there was none.
        latency_ms: From sending to the last byte of the answer, milliseconds.
        num_bytes: Size of the answer's body.
        body: The answer, when there is one.
        error: The error body, when there is one.
        detail: What went wrong in words, empty when nothing did.
        retry_after_s: When a refused client is to come back, seconds from the answer; 0 when it is not said.
        num_shed: How often the request was refused before.
    """

    outcome: Outcome
    status: int
    latency_ms: float
    num_bytes: int = 0
    body: RankResponse | None = None
    error: ErrorBody | None = None
    detail: str = ""
    retry_after_s: int = 0
    num_shed: int = 0


class MeshClient:
    """Speaks to one mesh; use as an asynchronous context manager.

    Args:
        url: Base URL, e.g. ``http://127.0.0.1:8361``.
        timeout_s: Longest wait for one answer; beyond it a request counts as hung.
        connections_max: Connections kept open at once.
        clock: Measures latencies.
        transport: Replaces the network, for tests.

    Raises:
        ConfigError: the environment names a token or certificates that cannot be read.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        connections_max: int,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._clock = clock
        ours = access(self.url)
        limits = httpx.Limits(max_connections=connections_max, max_keepalive_connections=connections_max)
        # trust_env off: a proxy of the user's environment has no business between us and a loopback mesh.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s),
            limits=limits,
            trust_env=False,
            headers=ours.headers,
            verify=ours.verify,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._http.__aexit__(kind, error, trace)

    async def rank(self, request: RankRequest, wire: Wire = "json") -> Answer:
        """Send one rank request."""
        content = encode(request, wire)
        headers = {"content-type": CONTENT_TYPES[wire], "accept": CONTENT_TYPES[wire]}
        began_s = self._clock.monotonic_s()
        try:
            response = await self._http.post("/v1/rank", content=content, headers=headers)
        except httpx.TimeoutException as error:
            return Answer("hung", 0, (self._clock.monotonic_s() - began_s) * 1e3, detail=type(error).__name__)
        except httpx.TransportError as error:
            return Answer(
                "broken", 0, (self._clock.monotonic_s() - began_s) * 1e3, detail=f"{type(error).__name__}: {error}"
            )
        return classify(response, (self._clock.monotonic_s() - began_s) * 1e3)

    async def rank_patiently(self, request: RankRequest, wire: Wire = "json") -> Answer:
        """Send a rank request, and again when it is told to where it is refused, ``SHED_MAX`` times at most."""
        num_shed = 0
        while (answer := await self.rank(request, wire)).outcome == "shed" and num_shed < SHED_MAX:
            num_shed += 1
            await self._clock.sleep_s(answer.retry_after_s)
        return replace(answer, num_shed=num_shed)

    async def append(self, events: EventsRequest) -> EventsResponse:
        """Append events.

        Raises:
            httpx.HTTPError: the mesh cannot be reached or refuses.
        """
        response = await self._http.post(
            "/v1/events", content=encode(events, "json"), headers={"content-type": CONTENT_TYPES["json"]}
        )
        response.raise_for_status()
        return EventsResponse.model_validate_json(response.content)

    async def get(self, path: str) -> Any:
        """Return the decoded JSON of ``GET path``.

        Raises:
            httpx.HTTPError: the mesh cannot be reached or refuses.
        """
        response = await self._http.get(path)
        response.raise_for_status()
        return orjson.loads(response.content)


def get_json(url: str, path: str, timeout_s: float) -> Any:
    """Return the decoded JSON of one ``GET``, outside an event loop.

    Raises:
        httpx.HTTPError: the mesh cannot be reached or refuses.
        ValueError: the answer is not JSON.
    """
    ours = access(url)
    response = httpx.get(f"{url}{path}", timeout=timeout_s, trust_env=False, headers=ours.headers, verify=ours.verify)
    response.raise_for_status()
    return orjson.loads(response.content)


def encode(body: BaseModel, wire: Wire) -> bytes:
    """Return a request body in one of the two wire forms; fields left at None are not sent."""
    document = body.model_dump(mode="json", exclude_none=True)
    return orjson.dumps(document) if wire == "json" else msgpack.packb(document)


def classify(response: httpx.Response, latency_ms: float) -> Answer:
    """Make an ``Answer`` of an HTTP response."""
    status, content = response.status_code, response.content
    try:
        document = _decode(content, response.headers.get("content-type", ""))
        if 200 <= status < 300:
            body = RankResponse.model_validate(document)
            outcome: Outcome = "degraded" if body.degraded else "ok"
            return Answer(outcome, status, latency_ms, len(content), body=body)
        error = ErrorBody.model_validate(document)
    except (ValueError, ValidationError) as problem:
        outcome = "garbled" if 200 <= status < 300 else _outcome(status)
        return Answer(outcome, status, latency_ms, len(content), detail=f"{problem} in {content[:200]!r}")
    wait = response.headers.get("retry-after", "")
    return Answer(
        _outcome(status),
        status,
        latency_ms,
        len(content),
        error=error,
        detail=f"{error.code}: {error.message}",
        retry_after_s=int(wait) if wait.isdecimal() else 0,
    )


def count_outcomes(answers: Iterable[Answer]) -> dict[str, int]:
    """Return how many answers had each outcome, most frequent first."""
    return dict(Counter(answer.outcome for answer in answers).most_common())


def _outcome(status: int) -> Outcome:
    return _STATUS_OUTCOMES.get(status, "failed" if status >= 500 else "rejected")


def _decode(content: bytes, content_type: str) -> Any:
    if content_type.partition(";")[0].strip() == CONTENT_TYPES["msgpack"]:
        return msgpack.unpackb(content)
    return orjson.loads(content)
