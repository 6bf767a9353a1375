"""What a request meets in an ingress replica before Ray Serve handles it.

Serve spends most of what a refusal costs: two tasks, contexts, counters, a queue for the body. What is refused by its
headers alone needs none of that, and while a burst is a queue in the ingress, each refusal waits for all before it.
Serve asks for middlewares of its HTTP servers by an import path (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``) in
every process that has one; where no ingress is, in the proxies, requests pass.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.ingress.first_look import FirstLook

SERVES_OWN = "/-/"
"""Paths that Serve answers itself: health checks of the balancer, which carry no token."""


class Doorstep:
    """Passes a request to the ingress's first look before all else.

    Args:
        app: Serve's handling of the request.
    """

    _look: ClassVar[FirstLook | None] = None
    _thread: ClassVar[int] = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @classmethod
    def take(cls, look: FirstLook) -> None:
        """Look at requests in this process from now on; called where the ingress runs."""
        cls._look, cls._thread = look, threading.get_ident()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        look = self._look
        # With RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD the ingress has another thread than its HTTP server.
        if look is None or threading.get_ident() != self._thread or scope.get("path", "").startswith(SERVES_OWN):
            await self._app(scope, receive, send)
        else:
            await look.pass_on(self._app, scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Serve puts around its handling of HTTP requests."""
    return [Middleware(Doorstep)]
