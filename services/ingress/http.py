"""The HTTP API over an ``IngressService``: bytes in, bytes out, and nothing that decides about ranking."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.ingress import body
from services.ingress.auth import OPEN_PATHS, Tokens
from services.ingress.directory import HealthBody
from services.ingress.first_look import APPROACH, RANK_PATH, FirstLook, LookFirst
from services.ingress.openapi import API_VERSION, openapi_document
from services.ingress.page_files import PageFile, load_page
from services.ingress.question import RankQuestion, Sender
from services.ingress.refusal import refusal
from services.ingress.service import IngressService
from services.ingress.text import shown
from shared.errors import InvalidRequestError, RankMeshError
from shared.schema.api import EventsRequest, UserPath

ResultT = TypeVar("ResultT")
Answer = Callable[[Request], Awaitable[Response]]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CLIENT_GONE = 499
"""Status of an answer that nobody reads: the client closed the connection."""

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Of the page and its parts: all of it is ours, none of it inline, and nobody may frame it."""


def create_app(service: IngressService, tokens: Tokens | None = None) -> FastAPI:
    """Return the application that serves one ingress replica.

    Args:
        service: The ingress.
        tokens: Who may call; None: everybody.
    """
    app = FastAPI(title="rankmesh", version=API_VERSION, redirect_slashes=False, docs_url=None, redoc_url=None)
    document = openapi_document(service.config, asks_for_token=tokens is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]  # FastAPI's documented way to replace the document
    _add_rank(app, service)
    _add_events(app, service)
    _add_forget(app, service)
    _add_views(app, service)
    _add_page(app, page := load_page())
    app.add_exception_handler(RankMeshError, _on_known_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unknown_error)
    app.state.first_look = FirstLook(service.rank_gate, tokens, frozenset((*OPEN_PATHS, *page)))
    app.add_middleware(HeadAsGet)
    app.add_middleware(LookFirst, look=app.state.first_look)
    return app


def _add_rank(app: FastAPI, service: IngressService) -> None:
    turn = asyncio.Lock()

    async def rank(request: Request) -> Response:
        if (approach := request.scope[APPROACH]) is None:  # the router takes a path with a line break at its end, too
            raise HTTPException(404)
        media, sender = body.response_type(request.headers), Sender.of(request.headers)
        content, media_in, received_s = await _read(request, service, body.RANK_TYPES)
        async with turn:  # one in each turn of the loop: who comes meanwhile is not refused after a burst of bodies
            question = RankQuestion.parse(content, media_in, service.config.limits, sender)
            await service.clock.sleep_s(0)
        answer = await _while_connected(request, service.answer(question, received_s, approach))
        return _gone() if answer is None else Response(body.encode(answer, media), media_type=media)

    app.add_api_route(RANK_PATH, rank, methods=["POST"], response_class=Response)


def _add_events(app: FastAPI, service: IngressService) -> None:
    async def append_events(request: Request) -> Response:
        media = body.response_type(request.headers)
        service.events_gate.check()
        content, media_in, _ = await _read(request, service, body.MEDIA_TYPES)
        events = body.validate(EventsRequest, body.decode(content, media_in))
        answer = await _while_connected(request, service.append(events))
        return _gone() if answer is None else Response(body.encode(dict(answer), media), media_type=media)

    app.add_api_route("/v1/events", append_events, methods=["POST"], response_class=Response)


def _add_forget(app: FastAPI, service: IngressService) -> None:
    async def forget(request: Request) -> Response:
        media = body.response_type(request.headers)
        service.events_gate.check()
        if not _is_text(request.scope["raw_path"]):  # decoded already, each broken byte as the same character
            raise InvalidRequestError(
                "user_id must be UTF-8", field="user_id", limit="UTF-8", value=shown(request.url.path)
            )
        user = body.validate(UserPath, {"user_id": request.path_params["user_id"]}).user_id
        answer = await _while_connected(request, service.forget(user))
        return _gone() if answer is None else Response(body.encode(answer, media), media_type=media)

    # ":path": an id may hold a slash.
    app.add_api_route("/v1/users/{user_id:path}/events", forget, methods=["DELETE"], response_class=Response)


def _add_views(app: FastAPI, service: IngressService) -> None:
    async def models() -> Response:
        return _json((await service.models()).model_dump_json())

    async def status() -> Response:
        return _json((await service.mesh_status()).model_dump_json())

    async def samples() -> Response:
        if service.serving.info.samples is None:
            return _error(404, "not_found", f"weights {service.serving.order.version} bring no samples")
        return _json(service.serving.info.samples)

    async def healthz() -> Response:
        return _json(HealthBody().model_dump_json())

    async def readyz() -> Response:
        return _json((await service.ready()).model_dump_json())

    async def metrics() -> Response:
        return Response(service.metrics(), media_type=METRICS_TYPE)

    views: dict[str, Callable[[], Awaitable[Response]]] = {
        "/v1/models": models, "/v1/status": status, "/v1/samples": samples, "/healthz": healthz, "/readyz": readyz,
        "/metrics": metrics,
    }  # fmt: skip
    for path, view in views.items():
        app.add_api_route(path, view, methods=["GET"], response_class=Response)


def _add_page(app: FastAPI, files: dict[str, PageFile]) -> None:
    def serve(file: PageFile) -> Callable[[], Awaitable[Response]]:
        async def page() -> Response:
            return Response(file.content, media_type=file.media_type, headers=PAGE_HEADERS)

        return page

    for path, file in files.items():
        app.add_api_route(path, serve(file), methods=["GET"], response_class=Response, include_in_schema=False)


async def _read(request: Request, service: IngressService, media_types: Sequence[str]) -> tuple[bytes, str, float]:
    """Return the body, decompressed, its media type, and when it was complete."""
    media = body.request_type(request.headers, media_types)
    limits = service.config.limits
    raw = await body.read_body(request.stream(), request.headers, limits.body_bytes_max, service.config.body_timeout_s)
    return raw, media, service.clock.monotonic_s()


async def _while_connected(request: Request, work: Awaitable[ResultT]) -> ResultT | None:
    """Await ``work``; cancel it and return None when the client closes the connection first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_text(raw_path: bytes) -> bool:
    """Return whether a path, percent-encoded as it came, is UTF-8."""
    try:
        unquote_to_bytes(raw_path).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _gone() -> Response:
    return Response(status_code=CLIENT_GONE)


def _json(content: str | bytes) -> Response:
    return Response(content, media_type=body.JSON)


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None, **context: object) -> Response:
    content = orjson.dumps({"code": code, "message": message, "context": context})
    return Response(content, status, headers, body.JSON)


async def _on_known_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RankMeshError)  # registered for this class alone
    return refusal(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: an unknown path or method."""
    assert isinstance(error, HTTPException)  # registered for this class alone
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", ""))
        headers = {"Allow": f"{allowed}, HEAD" if allowed == "GET" else allowed}
        message = f"{request.method} is not allowed on {request.url.path}, allowed: {headers['Allow']}"
        return _error(405, "method_not_allowed", message, headers, method=request.method)
    code = "not_found" if error.status_code == 404 else "http_error"
    message = f"there is no {request.url.path}" if error.status_code == 404 else str(error.detail)
    return _error(error.status_code, code, message, headers)


async def _on_unknown_error(_: Request, error: Exception) -> Response:
    return _error(500, "internal", f"{type(error).__name__} in the ingress; see its log")


class HeadAsGet:
    """Answers HEAD like GET without the body, which the framework does not do by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
