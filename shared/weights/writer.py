"""Writes one weights version: files first, the manifest last, and no reader sees anything before that."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import save_file

from shared.clock import Clock
from shared.errors import WeightsError
from shared.weights.layout import CODES
from shared.weights.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    Derivation,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFile,
    check_entry_name,
    check_version_name,
)

STAGING_PREFIX = ".staging-"
"""Start of the name of a folder that a writer has not committed; no version name starts with a dot."""

LOADING_PREFIX = ".loading-"
"""Start of the name of a folder that a loader has not filled yet."""


class WeightWriter:
    """A version in the making.

    Files are staged on local disk: beside the versions for a local store, so that ``commit`` is one rename of the
    folder; in the temporary folder for an object store, where ``commit`` uploads the files and then puts the manifest
    in one piece. Use as a context manager to drop the staged files when the block fails before ``commit``.

    Args:
        fs: File system of the store.
        root: Folder of the store.
        version: Name of the version; None: UTC time and content hash, ``20261129-201443-1a2b3c4d``.
        clock: Where the time of creation comes from.
        chunk_bytes: Size of the chunks that are read and checked on their own.
        derived: What the version was made of; None: it was trained.

    Raises:
        WeightsError: ``version`` is not a valid name, or staging cannot be made.
    """

    def __init__(
        self,
        fs: fsspec.AbstractFileSystem,
        root: str,
        version: str | None,
        clock: Clock,
        chunk_bytes: int = CHUNK_BYTES,
        derived: Derivation | None = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._derived = derived
        self._fs = fs
        self._root = root
        self._clock = clock
        self._files: dict[str, TensorFile] = {}
        self._documents: dict[str, FileEntry] = {}
        self._version = version
        self._closed = False
        try:
            if version is not None:
                check_version_name(version)
            if isinstance(fs, LocalFileSystem):
                self._staging = Path(root, f"{STAGING_PREFIX}{uuid.uuid4().hex}")
                self._staging.mkdir(parents=True)
            else:
                self._staging = Path(tempfile.mkdtemp(prefix="rankmesh-weights-"))
        except (ValueError, OSError) as error:
            raise WeightsError(f"cannot start weights {version}: {error}", version=version, file="") from error

    def __enter__(self) -> WeightWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drop what was staged and not committed."""
        self.abort()

    def add_tensors(self, group: str, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add a group of tensors as one file.

        Args:
            group: Name such as ``dense`` or ``tables/item``.
            tensors: name -> array of a type in ``layout.DTYPES``; at least one.

        Raises:
            WeightsError: the group is there already or empty, a name or type is not allowed, or the disk refuses.
        """
        path = f"{group}.safetensors"
        self._check(group, path, self._files)
        if not tensors:
            raise self._error(f"group {group} has no tensors", path)
        arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in tensors.items()}
        entries: dict[str, TensorEntry] = {}
        for name, array in arrays.items():
            if array.dtype not in CODES:
                allowed = ", ".join(map(str, CODES))
                raise self._error(f"tensor {name!r} has type {array.dtype}, allowed are {allowed}", path)
            entries[name] = TensorEntry.model_validate({"dtype": CODES[array.dtype], "shape": array.shape})
        target = self._prepare(path)
        try:
            save_file(arrays, target)
            entry = seal(target, path, self._chunk_bytes)
        except OSError as error:
            raise self._error(f"cannot be written: {error}", path) from error
        self._files[group] = TensorFile(**entry.model_dump(), tensors=entries)

    def add_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Add a JSON document.

        Args:
            name: Name such as ``model``.
            document: What ``json`` can write; NaN and infinities are refused.

        Raises:
            WeightsError: the name is taken or not allowed, the document is not JSON, or the disk refuses.
        """
        path = f"{name}.json"
        self._check(name, path, self._documents)
        target = self._prepare(path)
        try:
            target.write_text(json.dumps(document, indent=1, allow_nan=False), encoding="utf-8")
            self._documents[name] = seal(target, path, self._chunk_bytes)
        except (OSError, TypeError, ValueError) as error:
            raise self._error(f"cannot be written: {error}", path) from error

    def commit(self) -> str:
        """Publish the version: from here on ``WeightStore.versions`` lists it.

        Returns:
            The name of the version.

        Raises:
            WeightsError: nothing was added, the version exists, or the store refuses; nothing is published then.
        """
        if self._closed:
            raise self._error("the writer is closed", "")
        if not self._files and not self._documents:
            raise self._error("nothing was added", "")
        created = datetime.fromtimestamp(self._clock.now_s(), UTC)
        version = self._version or f"{created:%Y%m%d-%H%M%S}-{self._content_hash()}"
        self._version = version
        manifest = Manifest(
            version=version,
            created=f"{created:%Y-%m-%dT%H:%M:%S.%f}Z",
            files=self._files,
            documents=self._documents,
            derived=self._derived,
        )
        try:
            if isinstance(self._fs, LocalFileSystem):
                self._commit_local(version, manifest)
            else:
                self._commit_remote(version, manifest)
        except OSError as error:
            raise self._error(f"cannot be committed: {error}", MANIFEST_NAME) from error
        self._closed = True
        shutil.rmtree(self._staging, ignore_errors=True)  # nothing left of it when it was renamed
        return version

    def abort(self) -> None:
        """Drop what was staged; harmless after ``commit``."""
        self._closed = True
        shutil.rmtree(self._staging, ignore_errors=True)

    def _commit_local(self, version: str, manifest: Manifest) -> None:
        target = Path(self._root, version)
        if target.exists():
            raise self._error("exists already", MANIFEST_NAME)
        temporary = self._staging / f"{MANIFEST_NAME}.part"
        temporary.write_bytes(manifest.encode())
        sync_folder(temporary)
        temporary.rename(self._staging / MANIFEST_NAME)
        for folder, _, _ in os.walk(self._staging):
            sync_folder(Path(folder))
        self._staging.rename(target)  # atomic, and refused when another writer came first
        sync_folder(target.parent)

    def _commit_remote(self, version: str, manifest: Manifest) -> None:
        root = f"{self._root}/{version}"
        if self._fs.exists(f"{root}/{MANIFEST_NAME}"):
            raise self._error("exists already", MANIFEST_NAME)
        for entry in manifest.entries():
            remote = f"{root}/{entry.path}"
            self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(self._staging / entry.path), remote)
        self._fs.pipe_file(f"{root}/{MANIFEST_NAME}", manifest.encode())

    def _check(self, name: str, path: str, taken: Mapping[str, FileEntry]) -> None:
        if self._closed:
            raise self._error("the writer is closed", path)
        if name in taken:
            raise self._error(f"{name} was added already", path)
        try:
            check_entry_name(name)
        except ValueError as error:
            raise self._error(str(error), path) from error
        if path == MANIFEST_NAME:
            raise self._error(f"{name} is the name of the manifest", path)

    def _prepare(self, path: str) -> Path:
        target = self._staging / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(f"cannot be written: {error}", path) from error
        return target

    def _content_hash(self) -> str:
        entries = sorted((entry.path, entry.sha256) for entry in (*self._files.values(), *self._documents.values()))
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:8]

    def _error(self, reason: str, path: str) -> WeightsError:
        where = f"{path}: " if path else ""
        return WeightsError(f"weights {self._version or '(new)'}: {where}{reason}", version=self._version, file=path)


def seal(file: Path, path: str, chunk_bytes: int) -> FileEntry:
    """Flush a file to disk and return its entry: size and checksums, of the whole and of each chunk.

    Args:
        file: The file.
        path: Its path inside the version.
        chunk_bytes: Size of all chunks but the last.
    """
    whole, chunks, num_bytes = hashlib.sha256(), [], 0
    with file.open("rb") as opened:
        while data := opened.read(chunk_bytes):
            whole.update(data)
            chunks.append(hashlib.sha256(data).hexdigest())
            num_bytes += len(data)
        os.fsync(opened.fileno())
    return FileEntry(
        path=path, bytes=num_bytes, sha256=whole.hexdigest(), chunk_bytes=chunk_bytes, chunks=tuple(chunks)
    )


def sync_folder(path: Path) -> None:
    """Flush a folder's entries, or a file, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
