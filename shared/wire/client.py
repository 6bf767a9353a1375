"""A thin client of ``POST /v1/rank``: columns in, the decoded answer out. The standard library and numpy alone.

It compresses with zstd where the package ``zstandard`` is installed and the server takes it: a server that does not
answers 415 with ``Accept-Encoding``, and the client sends the same body plain from then on.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
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


class RankClient:
    """One connection to one mesh; for one thread.

    Args:
        url: Base URL, ``http://host:port``.
        timeout_s: Longest wait for an answer, seconds.
        compress: Whether to offer zstd.
    """

    def __init__(self, url: str, timeout_s: float = 10.0, *, compress: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"url must be http://host:port, is {url!r}")
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        self._zstd = compress and importlib.util.find_spec("zstandard") is not None

    def rank(self, batch: CandidateBatch, user_id: int | str, **fields: object) -> tuple[int, dict[str, Any]]:
        """Send one request.

        Args:
            batch: The candidates and what they carry.
            user_id: The user.
            **fields: Further fields of a rank request, e.g. ``limit=10``, ``deadline_ms=200``, ``surface="feed"``.

        Returns:
            HTTP status and the decoded body: an answer for 200, else an error with code, message and context.

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
        headers: Mapping[str, str] = {"Content-Type": MEDIA_TYPE, "Accept": "application/json"}
        if self._zstd and len(body) > COMPRESS_ABOVE_BYTES:
            import zstandard

            body = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)
            headers = {**headers, "Content-Encoding": ZSTD}
        self._connection.request("POST", "/v1/rank", body, headers)
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        return response.status, answer
