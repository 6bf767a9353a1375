"""What a client is told of an error."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from services.ingress import body
from shared.errors import RankMeshError

_INT64 = 1 << 63


def refusal(error: RankMeshError) -> Response:
    """Return the answer that tells a client of an error: code, message and context, and the headers that go with it."""
    context = {
        name: str(value)[:100] if isinstance(value, int) and not -_INT64 <= value < _INT64 else value
        for name, value in error.context.items()
    }
    headers = {}
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, round(float(error.context.get("retry_after_s") or 1))))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="rankmesh"'
    if error.context.get("field") == "content-encoding":
        headers["Accept-Encoding"] = ", ".join(body.ENCODINGS)  # RFC 7694: what a client may send instead
    content = orjson.dumps({"code": error.code, "message": error.message, "context": context})
    return Response(content, error.http_status, headers, body.JSON)
