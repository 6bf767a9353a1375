"""Logs: one JSON object a line, fields not sentences, never a secret.

A line has ``ts`` (UTC), ``level``, ``event``, the fields that the logger is bound to (``service``, ``replica``,
``request_id``), and the fields of the call. It is ASCII whatever the locale says.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal, TextIO, TypeAlias

from shared.clock import Clock, SystemClock

Level: TypeAlias = Literal["debug", "info", "warning", "error"]

TEXT_CHARS_MAX: Final = 4_096
"""Longer text values are cut."""

ITEMS_MAX: Final = 100
"""Longer lists and mappings are cut."""

LINE_CHARS_MAX: Final = 65_536
"""A longer line keeps only what it is bound to, and says how long it was."""

REDACTED: Final = "***"

_LEVELS: Final[dict[str, int]] = {"debug": 0, "info": 1, "warning": 2, "error": 3}
_DEPTH_MAX: Final = 6
_SECRET_NAME = re.compile(r"token|passw(or)?d|pass_?phrase|secret|api_?key|authorization|credential", re.IGNORECASE)
# User and password of a URL; greedy up to the last @ before the path, since a password may hold one itself. It starts
# at "://": a pattern that starts with the scheme takes quadratic time on a long word.
_URL_USER = re.compile(r"(?<=://)[^\s/?#]*@")
# The same with a slash in the password, which a URL should not hold but people paste; a port is none.
_URL_LOOSE_USER = re.compile(r"(?<=://)[^\s/?#:@]{0,256}:(?!\d+/)[^\s?#]{0,256}@")
# Of a store that has buckets and no ports: what stands behind a colon is a secret, also where the @ was forgotten.
_BUCKET_SECRET = re.compile(
    r"(?P<scheme>\b(?:s3a?|gc?s|az|abfss?|adl|r2)://)[^\s/?#:@]{0,256}:[^\s/?#'\"]+", re.IGNORECASE
)
_URL_QUERY = re.compile(
    r"(?P<name>[?&][\w.-]{0,64}?(?:token|passw(?:or)?d|secret|api_?key|credential|signature)[\w.-]{0,64}=)[^&\s#]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<scheme>\bbearer )[^\s\"',]+", re.IGNORECASE)


def redact_text(text: str) -> str:
    """Return the text without credentials: of URLs (``redis://:pw@host`` becomes ``redis://***@host``) and headers."""
    text = _URL_QUERY.sub(
        rf"\g<name>{REDACTED}", _URL_USER.sub(f"{REDACTED}@", _URL_LOOSE_USER.sub(f"{REDACTED}@", text))
    )
    text = _BUCKET_SECRET.sub(rf"\g<scheme>{REDACTED}", text)
    return _BEARER.sub(rf"\g<scheme>{REDACTED}", text)


def is_secret(name: str) -> bool:
    """Return whether a field is named like a secret."""
    return _SECRET_NAME.search(name) is not None


def redact(value: object, name: str = "") -> Any:
    """Return what may be logged of a value: JSON types, bounded, without secrets.

    Args:
        value: Anything; what JSON does not know is logged as its text.
        name: Field name; the value of a field named like a secret is replaced whole. Numbers and booleans are no
            secrets under a name with ``token`` (``num_tokens``), and are under all others.
    """
    return _redact(value, name, _DEPTH_MAX)


def _redact(value: object, name: str, depth: int) -> Any:
    if value is None:
        return None
    if match := _SECRET_NAME.search(name):
        if match.group().lower() == "token" and isinstance(value, int | float):
            return value
        return REDACTED
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    if depth > 0 and isinstance(value, Mapping):
        return {_text(str(key)): _redact(item, str(key), depth - 1) for key, item in islice(value.items(), ITEMS_MAX)}
    if depth > 0 and isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return [_redact(item, "", depth - 1) for item in islice(value, ITEMS_MAX)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy number
        return _redact(value.item(), name, 0)
    return _text(str(value))


def _text(text: str) -> str:
    if len(text) <= TEXT_CHARS_MAX:
        return redact_text(text)
    # Twice the limit is looked at, or a password at the cut would lose the @ that tells it.
    return f"{redact_text(text[: 2 * TEXT_CHARS_MAX])[:TEXT_CHARS_MAX]}... ({len(text)} characters)"


class JsonLogger:
    """Writes log lines; made once a process and bound to what all its lines share.

    Args:
        level: Smallest level that is written.
        stream: Where to; None: standard error, looked up at each line.
        clock: Clock of ``ts``.
        fields: Fields of every line.
    """

    def __init__(
        self,
        level: Level = "info",
        stream: TextIO | None = None,
        clock: Clock | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self._level: Level = level
        self._stream = stream
        self._clock = clock or SystemClock()
        self._fields: dict[str, Any] = {name: redact(value, name) for name, value in (fields or {}).items()}

    def bind(self, **fields: object) -> JsonLogger:
        """Return a logger whose lines have these fields too, e.g. ``service``, ``replica``, ``request_id``."""
        return JsonLogger(self._level, self._stream, self._clock, {**self._fields, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """Write a line of level debug; ``event`` is a fixed name such as ``request_done``."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Write a line of level info."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a line of level warning."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Write a line of level error; give an exception as ``error=``."""
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: Mapping[str, object]) -> None:
        if _LEVELS[level] < _LEVELS[self._level]:
            return
        head: dict[str, Any] = {
            "ts": datetime.fromtimestamp(self._clock.now_s(), UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            **self._fields,
        }
        line = dict(head)
        for name, value in fields.items():
            line[name] = redact(value, name)
            if isinstance(value, BaseException):
                line[name] = {"type": type(value).__name__, "message": line[name]}
        text = json.dumps(line, ensure_ascii=True, separators=(",", ":"))
        if len(text) > LINE_CHARS_MAX:
            text = json.dumps({**head, "dropped_chars": len(text)}, ensure_ascii=True, separators=(",", ":"))
        try:  # one write call a line: lines of several threads do not mix
            (self._stream or sys.stderr).write(f"{text}\n")
        except (OSError, ValueError):  # stream closed or its disk full: the request matters more than its log line
            return
