"""A thin client of ``POST /v1/rank``: columns in, the decoded answer out. The standard library and numpy alone.

It compresses with zstd where the package ``zstandard`` is installed and the server takes it: a server that does not
answers 415 with ``Accept-Encoding``, and the client sends the same body plain from then on.

A connection that the server has closed between two requests is opened again. One on which anything else went wrong is
closed: an answer that comes late can never be taken for that of the next request.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shared.wire.columns import CandidateBatch
from shared.wire.message import MEDIA_TYPE, encode_request

ZSTD = "zstd"
COMPRESS_ABOVE_BYTES = 1_024
"""Smaller bodies are sent plain: they fit one packet anyway."""

ZSTD_LEVEL = -5
"""Of 1,000 candidates with 30 features level 1 sends a fifth less and takes twice as long (``rankmesh bench wire``)."""

_WORDS_BYTES = 400


class RankClient:
    """One connection to one mesh; for one thread.

    Args:
        url: Base URL, ``http://host:port`` or ``https://host:port``.
        timeout_s: Longest wait for an answer, seconds.
        compress: Whether to offer zstd.
        token: Bearer token, where the mesh asks for one.

    Raises:
        ValueError: the URL is another one, or the token is none that a header can carry.
    """

    def __init__(self, url: str, timeout_s: float = 10.0, *, compress: bool = True, token: str | None = None) -> None:
        parts = urlsplit(url)
        more = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme not in ("http", "https") or parts.hostname is None or more:
            raise ValueError(f"url must be http://host:port or https://host:port, is {_without_password(url)!r}")
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = make(parts.hostname, parts.port, timeout=timeout_s)
        self._headers = {"Content-Type": MEDIA_TYPE, "Accept": "application/json"}
        if token is not None:
            if re.fullmatch(r"[\x21-\x7e]+", token) is None:  # http.client would say so, and show it
                raise ValueError("token must be of visible ASCII characters")
            self._headers["Authorization"] = f"Bearer {token}"
        self._zstd = compress and importlib.util.find_spec("zstandard") is not None

    def rank(self, batch: CandidateBatch, user_id: int | str, **fields: object) -> tuple[int, dict[str, Any]]:
        """Send one request.

        Args:
            batch: The candidates and what they carry.
            user_id: The user.
            **fields: Further fields of a rank request, e.g. ``limit=10``, ``deadline_ms=200``, ``surface="feed"``.

        Returns:
            HTTP status and the decoded body: an answer for 200, else an error with code, message and context. What
            stands in front of the mesh may answer in words: then they are the message.

        Raises:
            OSError: the mesh cannot be reached, or did not answer in time.
        """
        body = encode_request({"user_id": user_id, **fields}, batch)
        status, answer = self._post(body)
        if status == http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE and self._zstd:
            self._zstd = False
            status, answer = self._post(body)
        return status, answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        headers = self._headers
        if self._zstd and len(body) > COMPRESS_ABOVE_BYTES:
            import zstandard

            body = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)
            headers = {**headers, "Content-Encoding": ZSTD}
        was_open = self._connection.sock is not None
        try:
            status, content = self._exchange(body, headers)
        except ConnectionError:
            if not was_open:
                raise
            status, content = self._exchange(body, headers)  # closed between two requests; ranking changes nothing
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return status, answer
        words = content[:_WORDS_BYTES].decode("utf-8", "replace")
        return status, {"code": "not_json", "message": words, "context": {}}

    def _exchange(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        try:
            self._connection.request("POST", "/v1/rank", body, headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                raise OSError(f"no whole answer: {type(error).__name__}: {error}") from error
            raise


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2] if "@" in rest else url
