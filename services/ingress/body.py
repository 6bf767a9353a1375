"""Bytes from a client: size, media type, encoding, JSON or msgpack, schema. Everything wrong is a 4xx that says what.

JSON goes through the standard library, not orjson, because three things must be seen that orjson hides: a name that
occurs twice, an integer beyond 64 bits (orjson gives a rounded float), and NaN. 1,000 candidates cost 0.06 ms.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgpack
import orjson
import zstandard
from pydantic import BaseModel, ValidationError

from services.ingress.text import shown
from shared.errors import (
    InvalidRequestError,
    MalformedBodyError,
    NotAcceptableError,
    PayloadTooLargeError,
    SlowBodyError,
    UnsupportedMediaTypeError,
)
from shared.rules import broken, limit_of, rule
from shared.schema.api import FEATURES_CEILING
from shared.wire import MEDIA_TYPE

JSON = "application/json"
MSGPACK = "application/msgpack"
MEDIA_TYPES = (JSON, MSGPACK)
"""What an answer can be, and any request."""

RANK_TYPES = (*MEDIA_TYPES, MEDIA_TYPE)
"""What a rank request can be."""

ZSTD = "zstd"
ENCODINGS = (ZSTD, "identity")
"""Content encodings of a request."""

_WINDOW_BYTES_MAX = 8 * 2**20

_EXACT_MAX = 2**53

OBJECT_NAMES_MAX = FEATURES_CEILING
"""Names in one object of a body, known or not: each unknown one would become an error of its own."""

_UNION_MEMBERS = ("int", "str", "float", "<number>", "<ids>", "<weighted>")

BodyT = TypeVar("BodyT", bound=BaseModel)


def request_type(headers: Mapping[str, str], media_types: Sequence[str] = MEDIA_TYPES) -> str:
    """Return the media type of a request's body.

    Raises:
        UnsupportedMediaTypeError: missing, none of ``media_types``, in another charset than UTF-8, or compressed in
            another way than with zstd.
    """
    value = headers.get("content-type", "")
    media, _, parameters = value.partition(";")
    media = media.strip().lower()
    charset = _parameter(parameters, "charset")
    if media not in media_types or charset not in ("", "utf-8", "utf8"):
        _unsupported("content-type", media_types, value)
    if (encoding := _encoding(headers)) not in ENCODINGS:
        _unsupported("content-encoding", ENCODINGS, encoding)
    return media


def response_type(headers: Mapping[str, str]) -> str:
    """Return the media type that the client prefers for the answer; JSON when it does not care.

    Raises:
        NotAcceptableError: the client accepts neither.
    """
    accept = headers.get("accept", "")
    if not accept.strip():
        return JSON
    weights = dict.fromkeys(MEDIA_TYPES, (0.0, -1))
    for part in accept.split(","):
        pattern, _, parameters = part.partition(";")
        pattern = pattern.strip().lower()
        quality = _quality(_parameter(parameters, "q"))
        for media in MEDIA_TYPES:
            precision = {"*/*": 0, "application/*": 1, media: 2}.get(pattern, -1)
            if precision > weights[media][1]:
                weights[media] = (quality, precision)
    best = max(MEDIA_TYPES, key=lambda media: weights[media][0])
    if weights[best][0] <= 0:
        raise NotAcceptableError(
            f"the answer is {' or '.join(MEDIA_TYPES)}",
            field="accept",
            limit=", ".join(MEDIA_TYPES),
            value=shown(accept),
        )
    return best


async def read_body(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], bytes_max: int, timeout_s: float
) -> bytes:
    """Collect a body, refusing it as soon as it is known to be too large.

    Raises:
        PayloadTooLargeError: announced or received more than ``bytes_max`` bytes, or holds more when decompressed.
        MalformedBodyError: it does not decompress.
        SlowBodyError: it took longer than ``timeout_s`` seconds.
    """
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 15 or int(announced) > bytes_max):
        _too_large(announced, bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                body += chunk
                if len(body) > bytes_max:
                    _too_large(f"more than {bytes_max}", bytes_max)
    except TimeoutError as error:
        raise SlowBodyError(
            f"the body did not arrive within {timeout_s:g} s", field="body", limit=timeout_s, value=len(body)
        ) from error
    return _plain(bytes(body), bytes_max) if _encoding(headers) == ZSTD else bytes(body)


def _encoding(headers: Mapping[str, str]) -> str:
    return headers.get("content-encoding", "").strip().lower() or "identity"


def _plain(body: bytes, bytes_max: int) -> bytes:
    """Decompress one whole zstd frame with nothing behind it, never to more than the limit and a byte."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        # The second look is for what the first does not say: that the frame was whole, and all there was.
        if len(decompressor.stream_reader(body, read_across_frames=False).read(bytes_max + 1)) > bytes_max:
            _too_large(f"more than {bytes_max}", bytes_max)
        whole = decompressor.decompressobj()
        plain = whole.decompress(body)
    except zstandard.ZstdError as error:
        raise MalformedBodyError(
            f"the body is not valid zstd: {shown(str(error))}", field="body", limit=ZSTD, value=len(body)
        ) from error
    if not whole.eof or whole.unused_data:
        what = f"{len(whole.unused_data)} bytes follow the zstd frame" if whole.eof else "the zstd frame is cut off"
        raise MalformedBodyError(f"the body is not valid zstd: {what}", field="body", limit=ZSTD, value=len(body))
    return plain


def decode(body: bytes, media: str) -> object:
    """Decode a body into plain values.

    JSON knows one kind of number, so ``42.0`` is the integer 42 there (up to 2**53, where floats stop being exact);
    msgpack tells integers from floats, and so do we.

    Raises:
        MalformedBodyError: it is empty, not what ``media`` says, or names a field twice.
    """
    if not body:
        raise MalformedBodyError("the body is empty", field="body", limit=f"one {media} document", value="")
    try:
        if media == MSGPACK:
            return msgpack.unpackb(body, raw=False, object_pairs_hook=_pairs, ext_hook=_no_extension)
        text = body.decode("utf-8")
        return json.loads(text, object_pairs_hook=_pairs, parse_float=_number, parse_constant=_no_constant)
    except MalformedBodyError:
        raise
    except RecursionError as error:
        raise MalformedBodyError("the body is nested too deeply", field="body", limit="nesting", value="") from error
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        message = f"the body is not valid {media}: {shown(str(error))}"
        raise MalformedBodyError(
            message, field="body", limit=media, value=shown(body[:40].decode("utf-8", "replace"))
        ) from error


def validate(cls: type[BodyT], document: object) -> BodyT:
    """Validate decoded values against a schema.

    Raises:
        InvalidRequestError: names the first field that breaks a rule, the rule and the value.
    """
    if not isinstance(document, dict):
        raise InvalidRequestError(
            f"the body must be an object, is {type(document).__name__}",
            field="body",
            limit="object",
            value=shown(document),
        )
    try:
        return cls.model_validate(document)
    except ValidationError as error:
        raise _first_error(error) from error


def encode(body: dict[str, Any], media: str) -> bytes:
    """Encode an answer."""
    if media == MSGPACK:
        packed: bytes = msgpack.packb(body)
        return packed
    return orjson.dumps(body)


def _first_error(error: ValidationError) -> InvalidRequestError:
    errors = error.errors(include_url=False)
    # A union reports each member: ("user_id", "int") and ("user_id", "str") are one field that is neither.
    at = [tuple(part for part in each["loc"] if part not in _UNION_MEMBERS) for each in errors]
    same = [each for each, loc in zip(errors, at, strict=True) if loc == at[0]]
    field = ".".join(shown(part) for part in at[0]) or "body"
    value = shown(same[0]["input"])
    if same[0]["type"] == "missing":
        return InvalidRequestError(broken(field, same, ""), field=field, limit="required", value=None)
    if same[0]["type"] == "extra_forbidden":
        return InvalidRequestError(broken(field, same, ""), field=field, limit="known fields", value=value)
    limit = limit_of(same[0])
    return InvalidRequestError(
        broken(field, same, value), field=field, limit=rule(same[0]) if limit is None else limit, value=value
    )


def _pairs(pairs: list[tuple[object, object]]) -> dict[Any, object]:
    if len(pairs) > OBJECT_NAMES_MAX:
        raise MalformedBodyError(
            f"an object has {len(pairs)} names, limit {OBJECT_NAMES_MAX}",
            field="body", limit=OBJECT_NAMES_MAX, value=len(pairs),
        )  # fmt: skip
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[object] = set()
        twice = shown(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
        raise MalformedBodyError(f"{twice!r} occurs twice in one object", field=twice, limit="once", value="twice")
    return document


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT_MAX else value


def _no_constant(name: str) -> NoReturn:
    raise MalformedBodyError(f"{name} is not JSON", field="body", limit="finite numbers", value=name)


def _no_extension(code: int, _: bytes) -> NoReturn:
    raise MalformedBodyError(
        f"msgpack extension type {code} is not accepted", field="body", limit="plain types", value=code
    )


def _parameter(parameters: str, name: str) -> str:
    for part in parameters.split(";"):
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"').lower()
    return ""


def _quality(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 1.0) if text else 1.0
    except ValueError:
        return 0.0


def _unsupported(field: str, allowed: Sequence[str], value: str) -> NoReturn:
    raise UnsupportedMediaTypeError(
        f"{field} must be {' or '.join(allowed)}, is {shown(value)}",
        field=field, limit=", ".join(allowed), value=shown(value),
    )  # fmt: skip


def _too_large(size: str, bytes_max: int) -> NoReturn:
    raise PayloadTooLargeError(
        f"the body has {size} bytes, limit {bytes_max}", field="body", limit=bytes_max, value=size
    )
