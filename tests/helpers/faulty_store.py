"""A file system that fails as networks and disks do, on the reads that a test names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import fsspec

Fault: TypeAlias = Callable[[bytes], bytes]
"""Gets the bytes of a range, gives those that arrive; may raise."""


def cut(data: bytes) -> bytes:
    """End the read half way."""
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    """Flip one bit."""
    return data[:-1] + bytes([data[-1] ^ 1])


def reset(data: bytes) -> bytes:
    """Break the connection."""
    raise ConnectionResetError("connection reset by peer")


class FaultyStore:
    """Delegates to a file system; counts range reads, and spoils those that match.

    Args:
        fs: The file system.

    Attributes:
        reads: (end of path, start) -> number of range reads.
        bytes_read: Bytes that range reads gave.
        at_once_max: Most range reads that ran at the same time.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem) -> None:
        self._fs = fs
        self._lock = threading.Lock()
        self._faults: list[tuple[str, int, Fault, int]] = []
        self._at_once = 0
        self.reads: Counter[tuple[str, int]] = Counter()
        self.bytes_read = 0
        self.at_once_max = 0

    def spoil(self, path_end: str, start: int, fault: Fault, times: int = 1_000_000) -> None:
        """Apply a fault to the first ``times`` reads of a range."""
        self._faults.append((path_end, start, fault, times))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Read a range."""
        with self._lock:
            self._at_once += 1
            self.at_once_max = max(self.at_once_max, self._at_once)
            self.reads[path.rpartition("/")[2], start or 0] += 1
            number = self.reads[path.rpartition("/")[2], start or 0]
        try:
            data: bytes = self._fs.cat_file(path, start=start, end=end)
            for path_end, at, fault, times in self._faults:
                if path.endswith(path_end) and at == (start or 0) and number <= times:
                    data = fault(data)
        finally:
            with self._lock:
                self._at_once -= 1
        with self._lock:
            self.bytes_read += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)
