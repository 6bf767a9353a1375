"""The first look at a request, at its headers alone: who sends it, and whether a rank request has any chance.

What is refused here has cost nothing else yet: a burst of refusals is a queue itself, in which each waits for those
before it. A request is looked at once, by whoever gets it first: what stands before the API's server or the API itself.
"""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from services.ingress.admission import RankGate
from services.ingress.auth import Tokens
from services.ingress.question import tenant_of
from services.ingress.refusal import refusal
from shared.errors import RankMeshError

RANK_PATH = "/v1/rank"

APPROACH = "rankmesh.approach"
"""Where the scope of a request that was looked at says as what it is counted, None for all but rank requests.

A client sends headers, never names of the scope.
"""


class FirstLook:
    """Refuses what carries no token where one is asked for, and rank requests that could not be answered in time.

    Args:
        gate: Admission of rank requests.
        tokens: Who may call; None: everybody.
        open_paths: Exact paths that ask for no token.
    """

    def __init__(self, gate: RankGate, tokens: Tokens | None, open_paths: frozenset[str]) -> None:
        self._gate = gate
        self._tokens = tokens
        self._open = open_paths

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let ``app`` serve a request, as its bearer's, or answer with a refusal."""
        with ExitStack() as held:
            if scope["type"] == "http" and APPROACH not in scope:
                try:
                    scope = self._admit(scope, held)
                except RankMeshError as error:
                    await refusal(error)(scope, receive, send)
                    return
            await app(scope, receive, send)

    def _admit(self, scope: Scope, held: ExitStack) -> Scope:
        method, path = scope["method"], scope["path"]
        if self._tokens is not None and not (method in ("GET", "HEAD") and path in self._open):
            scope = self._tokens.admit(scope)
        approach = None
        if method == "POST" and path == RANK_PATH:
            approach = held.enter_context(self._gate.approach(tenant_of(scope["headers"])))
        return {**scope, APPROACH: approach}


class LookFirst:
    """The first look as a middleware.

    Args:
        app: What is behind it.
        look: The look.
    """

    def __init__(self, app: ASGIApp, look: FirstLook) -> None:
        self._app = app
        self._look = look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._look.pass_on(self._app, scope, receive, send)
