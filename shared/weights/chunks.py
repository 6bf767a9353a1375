"""Where chunks come from: a chain of sources, each asked in turn, each answer checked before it counts.

A chain is usually local disk, then the peers of other nodes (``shared.weights.peers``), then the origin store. What a
later source gave is kept by the earlier ones. One chunk is fetched once at a time in a process, however many ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shared.errors import InvalidRequestError, WeightsError
from shared.weights.errors import ChunkError
from shared.weights.manifest import CHUNK_BYTES_MAX, Chunk, check_path, check_version_name
from shared.weights.place import local_file

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """One chunk of one file of one version.

    Args:
        version: The version.
        path: Path of the file inside it.
        file_bytes: Size of the whole file.
        chunk: Which part, with its checksum.
    """

    version: str
    path: str
    file_bytes: int
    chunk: Chunk

    def validated(self) -> ChunkRequest:
        """Return the request; for whoever gets it from another process.

        Raises:
            InvalidRequestError: a name leads elsewhere, or a number is out of range.
        """
        chunk = self.chunk
        try:
            check_version_name(self.version)
            check_path(self.path)
        except ValueError as error:
            raise InvalidRequestError(str(error), field="path", value=self.path) from error
        if not 0 < chunk.length <= CHUNK_BYTES_MAX or not 0 <= chunk.offset <= self.file_bytes - chunk.length:
            raise InvalidRequestError(
                f"chunk must have 1 to {CHUNK_BYTES_MAX} bytes inside a file of {self.file_bytes}, "
                f"is {chunk.length} at {chunk.offset}",
                field="chunk",
                limit=CHUNK_BYTES_MAX,
                value=chunk.length,
            )
        if not _DIGEST.fullmatch(chunk.sha256):
            raise InvalidRequestError("chunk.sha256 must be 64 hex digits", field="chunk.sha256", value=chunk.sha256)
        return self

    def check(self, data: bytes, source: str) -> bytes:
        """Return the bytes when they are those of the chunk.

        Args:
            data: What a source gave.
            source: Its name, for the message.

        Raises:
            ChunkError: another length or checksum; the message names file, chunk, expected and found.
        """
        if len(data) != self.chunk.length:
            raise self.error(f"{source} gave {len(data)} bytes", f"{self.chunk.length} bytes", f"{len(data)} bytes")
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.chunk.sha256:
            found, expected = f"{digest[:12]}...", f"{self.chunk.sha256[:12]}..."
            raise self.error(f"{source} gave bytes of SHA-256 {found}", expected, found)
        return data

    def error(self, problem: str, expected: str, found: str) -> ChunkError:
        """Return the error of this chunk."""
        end = self.chunk.offset + self.chunk.length
        return ChunkError(
            f"weights {self.version}: {self.path} chunk {self.chunk.index} (bytes {self.chunk.offset} to {end}): "
            f"{problem}, the manifest says {expected}",
            version=self.version,
            file=self.path,
            chunk=self.chunk.index,
            expected=expected,
            found=found,
        )


class ChunkSource(Protocol):
    """A place that may have chunks."""

    @property
    def name(self) -> str:
        """Name for messages and counters."""
        ...

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        """Return the chunk, checked, or None when it is not there.

        Raises:
            ChunkError: the chunk is there and was cut short or is wrong.
            WeightsError: it cannot be had from here, and another try will not help.
        """
        ...


class OriginSource:
    """Range reads of the weight store.

    Args:
        fs: File system of the store.
        root: Folder of the versions.
        executor: Threads that block on reads; one stream each.
    """

    name = "origin"

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, executor: Executor) -> None:
        self._fs = fs
        self._root = root
        self._executor = executor
        self.bytes_read = 0

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        """Read the range; see ``ChunkSource.fetch``."""
        data = await asyncio.get_running_loop().run_in_executor(self._executor, self._read, wanted)
        self.bytes_read += len(data)
        return data

    def _read(self, wanted: ChunkRequest) -> bytes:
        path = f"{self._root}/{wanted.version}/{wanted.path}"
        begin, end = wanted.chunk.offset, wanted.chunk.offset + wanted.chunk.length
        try:
            if isinstance(self._fs, LocalFileSystem):
                self._check_local(wanted)
            data: bytes = self._fs.cat_file(path, start=begin, end=end)
        except FileNotFoundError as error:
            raise _broken(wanted, "is missing") from error
        except WeightsError:
            raise
        except Exception as error:  # whatever a driver raises when a connection breaks
            reason = f"cannot be read: {type(error).__name__}: {error}"
            raise wanted.error(reason, f"{wanted.chunk.length} bytes", "an error") from error
        if len(data) != wanted.chunk.length and (size := self._size(path)) not in (None, wanted.file_bytes):
            raise _broken(wanted, f"has {size} bytes, the manifest says {wanted.file_bytes}")
        return wanted.check(data, self.name)

    def _check_local(self, wanted: ChunkRequest) -> None:
        """Refuse before reading what is no such file: a read of a chunk that is too large takes its memory first."""
        try:
            size = local_file(f"{self._root}/{wanted.version}", wanted.path).stat().st_size
        except ValueError as error:
            raise _broken(wanted, str(error)) from error
        if size != wanted.file_bytes:
            raise _broken(wanted, f"has {size} bytes, the manifest says {wanted.file_bytes}")

    def _size(self, path: str) -> int | None:
        try:
            return int(self._fs.info(path)["size"])
        except OSError:  # the connection again: the short read itself is reported
            return None


def _broken(wanted: ChunkRequest, problem: str) -> WeightsError:
    message = f"weights {wanted.version}: {wanted.path} {problem}"
    return WeightsError(message, version=wanted.version, file=wanted.path, chunk=wanted.chunk.index)


class DiskCache:
    """Chunks on local disk by checksum, so that versions share what they have in common; oldest use goes first.

    Several processes may share the folder: writes are renames, and what another process removed is a miss.

    Args:
        folder: Where the chunks lie; made when it is not there.
        bytes_max: Limit on what is kept.
        executor: Threads for the disk.

    Raises:
        ValueError: ``bytes_max`` is under 1.
    """

    name = "disk"

    def __init__(self, folder: Path, bytes_max: int, executor: Executor) -> None:
        if bytes_max < 1:
            raise ValueError(f"bytes_max must be at least 1, is {bytes_max}")
        self._folder = folder
        self._bytes_max = bytes_max
        self._executor = executor
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        found = [(path.stat(), path.name) for path in folder.iterdir() if _DIGEST.fullmatch(path.name)]
        found.sort(key=lambda entry: entry[0].st_mtime_ns)
        self._sizes: OrderedDict[str, int] = OrderedDict((name, stat.st_size) for stat, name in found)

    @property
    def bytes_held(self) -> int:
        """Bytes of the chunks that this process knows of."""
        with self._lock:
            return sum(self._sizes.values())

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        """Read a chunk; one that went bad is removed and counts as a miss. See ``ChunkSource.fetch``."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read, wanted)

    async def keep(self, wanted: ChunkRequest, data: bytes) -> None:
        """Keep a checked chunk; one that is larger than the whole cache is not kept."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._write, wanted.chunk.sha256, data)

    def _read(self, wanted: ChunkRequest) -> bytes | None:
        name = wanted.chunk.sha256
        try:
            data = wanted.check((self._folder / name).read_bytes(), self.name)
        except FileNotFoundError:
            return None
        except (ChunkError, OSError):
            self._drop(name)
            return None
        with self._lock:
            self._sizes[name] = len(data)
            self._sizes.move_to_end(name)
        return data

    def _write(self, name: str, data: bytes) -> None:
        if len(data) > self._bytes_max:
            return
        part = self._folder / f".{name}-{uuid.uuid4().hex}"
        try:
            part.write_bytes(data)
            part.rename(self._folder / name)
        except OSError:  # a full disk costs later reads, not this load
            part.unlink(missing_ok=True)
            return
        with self._lock:
            self._sizes[name] = len(data)
            self._sizes.move_to_end(name)
            evicted, held = [], sum(self._sizes.values())
            while held > self._bytes_max:
                oldest, size = self._sizes.popitem(last=False)
                evicted.append(oldest)
                held -= size
        for oldest in evicted:
            (self._folder / oldest).unlink(missing_ok=True)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
        try:
            (self._folder / name).unlink()
        except OSError:  # somebody else was faster
            return


class ChainSource:
    """Asks sources in order; the first cache in front keeps what those behind it gave.

    Args:
        sources: At least one, nearest first.
        cache: One of them, or None: nothing is kept.

    Raises:
        ValueError: there is no source.
    """

    name = "chain"

    def __init__(self, sources: Sequence[ChunkSource], cache: DiskCache | None = None) -> None:
        if not sources:
            raise ValueError("a chain needs at least one source")
        self._sources = tuple(sources)
        self._cache = cache
        self._flights: dict[str, asyncio.Task[bytes | None]] = {}
        self.bytes_by_source: Counter[str] = Counter()

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        """Return the chunk from the first source that has it; who asks meanwhile shares the answer.

        Raises:
            ChunkError: the last source that has it gave it short or wrong.
            WeightsError: no source has it.
        """
        key = wanted.chunk.sha256
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(self._fetch(wanted), name=f"chunk {key[:12]}")
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        # Shielded: one who gives up must not take the chunk from the others.
        return await asyncio.shield(flight)

    def _landed(self, key: str, done: asyncio.Task[bytes | None]) -> None:
        self._flights.pop(key, None)
        if not done.cancelled():
            done.exception()  # a failure that nobody waits for any more is no unhandled one

    async def _fetch(self, wanted: ChunkRequest) -> bytes | None:
        failure: WeightsError | None = None
        for source in self._sources:
            try:
                data = await source.fetch(wanted)
            except WeightsError as error:
                failure = error
                continue
            if data is None:
                continue
            self.bytes_by_source[source.name] += len(data)
            if self._cache is not None and source is not self._cache:
                await self._cache.keep(wanted, data)
            return data
        raise failure or _broken(wanted, f"chunk {wanted.chunk.index} is nowhere to be had")
