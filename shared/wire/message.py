"""A whole rank request as bytes: a few bytes of frame, the request's fields as JSON, the candidates as a block."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from shared.wire.block import encode_batch
from shared.wire.codec import Reader, malformed
from shared.wire.columns import CandidateBatch

MEDIA_TYPE = "application/vnd.rankmesh.columns"
"""Content-Type of a request in this format."""

MAGIC = b"RMWC"
FORMAT = 1
"""Counts up when a decoder of the former number would misread; a server names the ones that it takes."""

_RESERVED = bytes(3)
_FRAME = struct.Struct("<4sB3sI")


def encode_request(fields: Mapping[str, Any], batch: CandidateBatch) -> bytes:
    """Return the body of a rank request.

    Args:
        fields: The fields of a rank request except ``candidates`` and ``features``, plain values.
        batch: The candidates.

    Raises:
        ValueError: see ``encode_batch``.
    """
    header = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("utf-8")
    return _FRAME.pack(MAGIC, FORMAT, _RESERVED, len(header)) + header + encode_batch(batch)


def split_request(body: bytes) -> tuple[bytes, bytes]:
    """Return the JSON bytes of the fields, and the block of the candidates.

    Raises:
        MalformedBodyError: the frame is not this format, or not this version of it.
    """
    reader = Reader(body)
    magic, version, reserved, length = _FRAME.unpack(reader.raw("body", _FRAME.size))
    if magic != MAGIC:
        malformed("body", f"must begin with {MAGIC.decode()}", MAGIC.decode(), magic.decode("latin-1"))
    if version != FORMAT:
        malformed("body.format", f"must be {FORMAT}, is {version}", FORMAT, version)
    if reserved != _RESERVED:
        malformed("body", f"has reserved bytes set: {reserved.hex()}", _RESERVED.hex(), reserved.hex())
    header = reader.raw("body.header", length)
    return header, reader.raw("body.columns", reader.num_left)
