"""Loads a version onto local disk over many streams, checked chunk by chunk, and resumes where it was cut.

The files grow in ``.loading-<version>`` beside the finished versions; the folder gets its name when every chunk is
right and the manifest is written. So a version is there whole or not at all, and what a dead process left is used
again: its chunks are known by their checksums. One process of a machine loads, others wait and map the same files.

Small groups come before tables: a replica can build its network and warm it up while rows are still on their way.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, TypeVarTuple

from pydantic import Field

from shared.clock import Clock, SystemClock
from shared.config import Config
from shared.errors import WeightsError
from shared.weights.chunks import ChainSource, ChunkRequest, ChunkSource, OriginSource
from shared.weights.errors import ChunkError
from shared.weights.manifest import CHUNK_BYTES, MANIFEST_NAME, Chunk, FileEntry, Manifest
from shared.weights.reader import WeightReader
from shared.weights.state import ROW_GROUPS
from shared.weights.store import WeightStore
from shared.weights.writer import LOADING_PREFIX

ArgTs = TypeVarTuple("ArgTs")
ResultT = TypeVar("ResultT")

FIRST_GROUP: Final = "dense"
_LOCK_POLL_S = 0.1


class LoadConfig(Config):
    """How a version is loaded.

    Args:
        streams: Chunks that are on their way at once.
        in_flight_bytes_max: Bytes of chunks held in memory at once; one chunk is always let through.
        attempts_max: Times that one chunk is asked for.
        retries_max: Repeated chunks in one load, all together.
        backoff_s: Wait before the first repeat of a chunk; doubles with each.
        backoff_max_s: Limit on that wait.
        lock_wait_s: How long to wait for another process of this machine that loads the same version.
    """

    streams: int = Field(8, ge=1, le=256)
    in_flight_bytes_max: int = Field(256 * 2**20, ge=1)
    attempts_max: int = Field(5, ge=1, le=100)
    retries_max: int = Field(256, ge=0, le=1_000_000)
    backoff_s: float = Field(0.2, ge=0, le=60)
    backoff_max_s: float = Field(5.0, ge=0, le=600)
    lock_wait_s: float = Field(1800.0, ge=0, le=86_400)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is.

    Args:
        version: The version.
        bytes_total: Bytes of all files.
        bytes_done: Bytes on disk and right, those found there included.
        bytes_found: Bytes that an earlier load left.
        files_total: Number of files.
        files_done: Names of finished files, in order: ``dense``, ``tables/item``, ``model.json``.
        retries: Chunks that were asked for again.
    """

    version: str
    bytes_total: int
    bytes_done: int = 0
    bytes_found: int = 0
    files_total: int = 0
    files_done: tuple[str, ...] = ()
    retries: int = 0


OnProgress: TypeAlias = Callable[[LoadProgress], None]


def load_order(manifest: Manifest) -> list[tuple[str, FileEntry]]:
    """Return the files of a version in the order in which they are loaded, with their names.

    Documents, then the dense group, then other groups, then tables, each kind from small to large.
    """
    documents = [(f"{name}.json", entry) for name, entry in manifest.documents.items()]
    groups: list[tuple[str, FileEntry]] = list(manifest.files.items())

    def rank(item: tuple[str, FileEntry]) -> tuple[int, int, str]:
        name, entry = item
        kind = 0 if name == FIRST_GROUP else 2 if name.startswith(ROW_GROUPS) else 1
        return kind, entry.bytes, name

    return sorted(documents, key=lambda item: (item[1].bytes, item[0])) + sorted(groups, key=rank)


class ByteBudget:
    """Lets work begin while the bytes that it holds fit; in order of arrival.

    Args:
        limit: Bytes; one piece that is larger than all of it goes alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.held = 0
        self.held_max = 0

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until the bytes fit, and hold them for the block."""
        cost = min(num_bytes, self._limit)
        if self._waiting or self.held + cost > self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((cost, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(cost)  # its turn had come in the same moment
                raise
        else:
            self.held += cost
        self.held_max = max(self.held_max, self.held)
        try:
            yield
        finally:
            self._release(cost)

    def _release(self, cost: int) -> None:
        self.held -= cost
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done() and self.held + wanted > self._limit:
                break
            self._waiting.popleft()
            if not turn.done():
                self.held += wanted
                turn.set_result(None)


@dataclass(slots=True)
class _File:
    """A file on its way: its handle, and the chunks that are missing."""

    name: str
    entry: FileEntry
    handle: int
    missing: list[Chunk] = field(default_factory=list)
    num_left: int = 0


class ParallelLoader:
    """Fills a local folder with versions.

    Args:
        source: Where chunks come from.
        root: Local folder of finished versions; a ``WeightStore`` of it opens them.
        executor: Threads for disk work.
        config: Streams, limits, repeats.
        clock: For waits between repeats.
    """

    def __init__(
        self,
        source: ChunkSource,
        root: Path,
        executor: ThreadPoolExecutor,
        config: LoadConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._root = root
        self._executor = executor
        self._config = config or LoadConfig()
        self._clock = clock or SystemClock()
        self._retries = 0
        self.budget = ByteBudget(self._config.in_flight_bytes_max)

    async def load(self, manifest: Manifest, progress: OnProgress | None = None) -> WeightReader:
        """Bring a version to local disk; one that is there already costs nothing.

        Args:
            manifest: Of the version.
            progress: Is told after each chunk and each file.

        Returns:
            A reader of the local files.

        Raises:
            WeightsError: a chunk cannot be had or stays wrong; names file, chunk, expected and found. What is right so
                far is kept for the next try.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        async with self._alone(manifest.version):
            if not self._is_here(manifest):
                await self._fill(manifest, progress or (lambda _: None))
        return WeightStore(self._root).open(manifest.version)

    async def _fill(self, manifest: Manifest, progress: OnProgress) -> None:
        staging = self._root / f"{LOADING_PREFIX}{manifest.version}"
        order = load_order(manifest)
        files: list[_File] = []
        self._retries = 0
        state = LoadProgress(manifest.version, sum(entry.bytes for _, entry in order), files_total=len(order))
        try:
            for name, entry in order:
                files.append(await self._in_thread(_open, staging, name, entry))
            found = state.bytes_total - sum(chunk.length for file in files for chunk in file.missing)
            done = tuple(file.name for file in files if not file.num_left)
            state = replace(state, bytes_done=found, bytes_found=found, files_done=done)
            progress(state)
            await self._stream(manifest.version, files, state, progress)
        except OSError as error:
            message = f"weights {manifest.version}: cannot be written to {staging}: {error}"
            raise WeightsError(message, version=manifest.version, file=str(staging)) from error
        finally:
            for file in files:
                os.close(file.handle)
        (staging / MANIFEST_NAME).write_bytes(manifest.encode())
        staging.rename(self._root / manifest.version)

    async def _stream(self, version: str, files: list[_File], state: LoadProgress, progress: OnProgress) -> None:
        """Run the streams until no chunk is missing; the first failure ends all."""
        wanted = iter([(file, chunk) for file in files for chunk in file.missing])

        async def run() -> None:
            nonlocal state
            for file, chunk in wanted:  # shared: each stream takes what comes next
                async with self.budget.hold(chunk.length):
                    data = await self._fetch(ChunkRequest(version, file.entry.path, file.entry.bytes, chunk))
                    await self._in_thread(_write, file.handle, data, chunk.offset)
                file.num_left -= 1
                finished = state.files_done if file.num_left else (*state.files_done, file.name)
                state = replace(
                    state, bytes_done=state.bytes_done + chunk.length, files_done=finished, retries=self._retries
                )
                progress(state)

        tasks = [asyncio.get_running_loop().create_task(run()) for _ in range(self._config.streams)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _fetch(self, wanted: ChunkRequest) -> bytes:
        for attempt in range(1, self._config.attempts_max + 1):
            try:
                data = await self._source.fetch(wanted)
            except ChunkError as error:
                if attempt == self._config.attempts_max or self._retries >= self._config.retries_max:
                    raise self._given_up(error, attempt) from error
            else:
                if data is None:
                    raise wanted.error("no source has it", f"{wanted.chunk.length} bytes", "nothing")
                return data
            self._retries += 1
            await self._clock.sleep_s(min(self._config.backoff_s * 2 ** (attempt - 1), self._config.backoff_max_s))
        raise AssertionError("a chunk is asked for at least once")

    def _given_up(self, error: ChunkError, attempt: int) -> WeightsError:
        spent = f"{attempt} attempts for this chunk, {self._retries} repeats in all"
        limits = f"limits {self._config.attempts_max} and {self._config.retries_max}"
        return WeightsError(f"{error.message} ({spent}, {limits})", **error.context)

    @asynccontextmanager
    async def _alone(self, version: str) -> AsyncIterator[None]:
        """Hold this machine's lock of a version; the lock goes with the process that dies."""
        handle = os.open(self._root / f".lock-{version}", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline_s = self._clock.monotonic_s() + self._config.lock_wait_s
            while not _try_lock(handle):
                if self._clock.monotonic_s() >= deadline_s:
                    raise WeightsError(
                        f"weights {version}: another process has been loading them for {self._config.lock_wait_s} s",
                        version=version,
                        file="",
                    )
                await self._clock.sleep_s(_LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    def _is_here(self, manifest: Manifest) -> bool:
        """Return whether the finished version is on disk; a manifest of the same name and other content is refused."""
        folder = self._root / manifest.version
        if not folder.exists():
            return False
        held = WeightStore(self._root).open(manifest.version).manifest
        if held != manifest:
            raise WeightsError(
                f"weights {manifest.version}: {folder} holds another content under this name",
                version=manifest.version,
                file=MANIFEST_NAME,
            )
        return True

    async def _in_thread(self, work: Callable[[*ArgTs], ResultT], *args: *ArgTs) -> ResultT:
        """Run disk work on a thread, to its end even when the caller is cancelled: it holds a file that gets closed."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


async def load_version(
    store: WeightStore,
    version: str,
    root: Path,
    config: LoadConfig | None = None,
    progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> WeightReader:
    """Load a version from a store onto local disk, without peers and without a chunk cache.

    Args:
        store: The origin.
        version: The version.
        root: Local folder of finished versions.
        config: Streams, limits, repeats.
        progress: Is told after each chunk and each file.
        clock: For waits between repeats.

    Raises:
        WeightsError: there is no such version, or a part of it cannot be had.
    """
    config = config or LoadConfig()
    with ThreadPoolExecutor(config.streams, thread_name_prefix="weights") as executor:
        source = ChainSource([OriginSource(store.fs, store.root, executor)])
        loader = ParallelLoader(source, root, executor, config, clock)
        return await loader.load(store.open(version).manifest, progress)


def _open(staging: Path, name: str, entry: FileEntry) -> _File:
    """Open a file that is being filled, at its full size, and find out which chunks it lacks."""
    path = staging / entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_new = os.fstat(handle).st_size == 0
        os.ftruncate(handle, entry.bytes)
        missing = [chunk for chunk in entry.pieces() if is_new or _digest(handle, chunk) != chunk.sha256]
    except OSError:
        os.close(handle)
        raise
    return _File(name, entry, handle, missing, len(missing))


def _digest(handle: int, chunk: Chunk) -> str:
    digest, offset, end = hashlib.sha256(), chunk.offset, chunk.offset + chunk.length
    while offset < end and (data := os.pread(handle, min(CHUNK_BYTES, end - offset), offset)):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


def _write(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:  # a write may be shorter than asked
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
