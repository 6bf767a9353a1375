"""A blocking HTTP client of a mesh for the command line: answers are validated, failures are ``RankMeshError``."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from cluster.access import access
from shared.errors import RankMeshError, StageUnavailableError
from shared.hashing import EntityId
from shared.rules import broken, short
from shared.schema.api import ErrorBody, EventsRequest, EventsResponse, ForgetResponse, RankRequest, RankResponse
from shared.settings import Settings

TIMEOUT_S = 30.0
"""Longest wait for one answer; far over any deadline that a request may carry."""

BodyT = TypeVar("BodyT", bound=BaseModel)


class Client:
    """Speaks to one mesh; use as a context manager.

    Args:
        url: Base URL, e.g. ``http://127.0.0.1:8341``.
        transport: Replaces the network, for tests.
        settings: Token and trusted certificates; None: of the environment.

    Raises:
        ConfigError: a token or certificates are named that cannot be read.
    """

    def __init__(
        self, url: str, transport: httpx.BaseTransport | None = None, settings: Settings | None = None
    ) -> None:
        self.url = url.rstrip("/")
        ours = access(self.url, settings)
        # trust_env off: a proxy of the user's environment has no business between us and a mesh on loopback.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=TIMEOUT_S,
            trust_env=False,
            transport=transport,
            headers=ours.headers,
            verify=ours.verify,
        )

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        self._http.close()

    def rank(self, request: RankRequest) -> RankResponse:
        """Rank candidates.

        Raises:
            RankMeshError: the mesh is out of reach or refuses; the class is that of the error's code.
        """
        return self._checked(RankResponse, self._call("POST", "/v1/rank", request))

    def append(self, events: EventsRequest) -> EventsResponse:
        """Append events to users' logs.

        Raises:
            RankMeshError: the mesh is out of reach or refuses.
        """
        return self._checked(EventsResponse, self._call("POST", "/v1/events", events))

    def forget(self, user: EntityId) -> ForgetResponse:
        """Delete a user's events and profile.

        Raises:
            RankMeshError: the mesh is out of reach or refuses.
        """
        return self._checked(ForgetResponse, self._call("DELETE", f"/v1/users/{quote(str(user), safe='')}/events"))

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of ``GET path``.

        Raises:
            RankMeshError: the mesh is out of reach, refuses, or answers with something else.
        """
        document = self._call("GET", path)
        if not isinstance(document, dict):
            raise StageUnavailableError(
                f"{self.url}{path} answered {type(document).__name__}, not an object", stage="ingress"
            )
        return document

    def fetch(self, cls: type[BodyT], path: str) -> BodyT:
        """Return the validated body of ``GET path``.

        Raises:
            RankMeshError: the mesh is out of reach, refuses, or answers with something else.
        """
        return self._checked(cls, self.get(path))

    def samples(self) -> dict[str, Any]:
        """Return sample requests and item names of the mesh's weights; an empty object when they have none.

        Raises:
            RankMeshError: the mesh is out of reach or refuses for another reason.
        """
        try:
            return self.get("/v1/samples")
        except RankMeshError as error:
            if error.http_status == 404 or error.context.get("status") == 404:
                return {}
            raise

    def _call(self, method: str, path: str, body: BaseModel | None = None) -> Any:
        content = None if body is None else body.model_dump_json(exclude_none=True)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            response = self._http.request(method, path, content=content, headers=headers)
        except httpx.TimeoutException as error:
            raise StageUnavailableError(
                f"{self.url}{path} did not answer within {TIMEOUT_S:.0f} s", stage="ingress"
            ) from error
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            tls = " (with TLS its URL begins with https)" if self.url.startswith("http:") else ""
            raise StageUnavailableError(
                f"what listens at {self.url} broke off, or does not speak HTTP{tls}: if it is no mesh that ends, "
                "that is not a rankmesh",
                stage="ingress",
            ) from error
        except httpx.TransportError as error:
            if (refused := _tls_error(error)) is not None:
                raise StageUnavailableError(f"{self.url}: {_in_words(refused)}", stage="ingress") from error
            raise StageUnavailableError(
                f"no mesh answers at {self.url}; start one with `rankmesh up`, or name it with --url or --port",
                stage="ingress",
            ) from error
        try:
            document = response.json()
        except ValueError as error:
            # A mesh's balancer has pages of its own, for the moments without an ingress.
            whose = f"{self.url}{path}" if response.status_code >= 500 else f"that is not a rankmesh: {self.url}{path}"
            raise StageUnavailableError(
                f"{whose} answered {response.status_code} with something that is not JSON; is it the port for clients?",
                stage="ingress",
            ) from error
        if response.status_code >= 400:
            raise _error(response.status_code, document, f"{self.url}{path}")
        return document

    def _checked(self, cls: type[BodyT], document: object) -> BodyT:
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StageUnavailableError(
                f"{self.url} answered a {cls.__name__} that is not one, so it is no rankmesh of this version: "
                f"{broken(where, [first], short(first['input']))}",
                stage="ingress",
            ) from error


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return what went wrong in TLS, None where it was something else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _in_words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}); name the file of the mesh's certificate, or of "
            "its authority, in RANKMESH_CA_FILE"
        )
    return f"what listens there does not speak TLS as we do ({error.reason}); without TLS its URL begins with http"


def _error(status: int, document: object, url: str) -> RankMeshError:
    try:
        body = ErrorBody.model_validate(document)
    except ValidationError:
        if status < 500:
            return StageUnavailableError(f"that is not a rankmesh: {url} answered {status}", status=status)
        return StageUnavailableError(f"{url} answered {status}: {short(document, 200)}", status=status)
    cls = _classes().get(body.code, RankMeshError)
    return cls(body.message, **body.context)


def _classes() -> dict[str, type[RankMeshError]]:
    classes = {RankMeshError.code: RankMeshError}
    waiting = [RankMeshError]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            classes[cls.code] = cls
            waiting.append(cls)
    return classes
