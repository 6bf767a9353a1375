"""A file system with a limit on each stream, as object stores have: one connection is slow, many are not."""

from __future__ import annotations

import threading
from typing import Any

import fsspec

from shared.clock import SystemClock


class CappedStore:
    """Delegates to a file system; each range read takes as long as its bytes would at the capped rate.

    Reads that run at the same time do not slow one another: each is a stream of its own.

    Args:
        fs: The file system.
        bytes_per_s: Limit on one stream.

    Attributes:
        bytes_read: Bytes that range reads gave.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, bytes_per_s: float) -> None:
        self._fs = fs
        self._bytes_per_s = bytes_per_s
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read a range at the capped rate."""
        began_s = self._clock.monotonic_s()
        data: bytes = self._fs.cat_file(path, start=start, end=end)
        self._clock.block_s(began_s + len(data) / self._bytes_per_s - self._clock.monotonic_s())
        with self._lock:
            self.bytes_read += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file system's own."""
        return getattr(self._fs, name)
