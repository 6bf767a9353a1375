"""Where the log lines of a replica go: into Serve's file of that replica.

Serve takes over a replica's standard error, as lines of level INFO, and keeps a thousand of them in memory before it
writes (``cluster.environment`` says why): what had gone wrong was in no file until much later, and in none at all where
the replica ended before. So a line goes to Serve's logger under its own level, and one that is a warning or worse is
written at once, with all that wait before it.
"""

from __future__ import annotations

import io
import logging
from typing import Final, TextIO, cast

LOGGER: Final = "ray.serve"

_HEAD_CHARS: Final = 80
"""A line begins with its time and its level."""

_MAY_WAIT: Final = ('"level":"info"', '"level":"debug"')


class _ReplicaLog(io.TextIOBase):
    def __init__(self) -> None:
        super().__init__()
        self._logger = logging.getLogger(LOGGER)

    def write(self, text: str) -> int:
        head = text[:_HEAD_CHARS]
        level = logging.INFO if any(mark in head for mark in _MAY_WAIT) else logging.ERROR
        self._logger.log(level, "%s", text.rstrip("\n"))
        return len(text)


def replica_log() -> TextIO:
    """Return the stream for the logger of a replica; one line a call."""
    return cast(TextIO, _ReplicaLog())
