"""Reads one weights version; nothing is handed out before its size and SHA-256 match the manifest."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from typing import Any

import fsspec
import numpy.typing as npt
from fsspec.implementations.local import LocalFileSystem

from shared.errors import WeightsError
from shared.weights.layout import CODES, Tensors, view_tensors
from shared.weights.manifest import FileEntry, Manifest, TensorFile
from shared.weights.place import local_file


class WeightReader:
    """Verified tensors and documents of one version; safe to use from several threads.

    Each file is checked once, on first use. Files of a local store are mapped, not read: their arrays are views of the
    page cache that all processes of a machine share. Arrays are read-only; copy before writing.

    Args:
        fs: File system of the store.
        root: Folder of the version.
        manifest: Its manifest.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, manifest: Manifest) -> None:
        self._fs = fs
        self._root = root
        self._manifest = manifest
        self._lock = threading.RLock()
        self._groups: dict[str, Tensors] = {}

    @property
    def version(self) -> str:
        """Name of the version."""
        return self._manifest.version

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return self._manifest

    def groups(self) -> tuple[str, ...]:
        """Return the names of the tensor groups."""
        return tuple(self._manifest.files)

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON document.

        Raises:
            WeightsError: there is no such document, or it does not match the manifest.
        """
        entry = self._manifest.documents.get(name)
        if entry is None:
            raise self._missing("document", name, tuple(self._manifest.documents))
        try:
            document = json.loads(bytes(self._verified(entry)))
        except (ValueError, RecursionError) as error:
            raise self._error(entry, [f"is not JSON: {error}"]) from error
        if not isinstance(document, dict):
            raise self._error(entry, [f"must hold an object, has {type(document).__name__}"])
        return document

    def tensors(self, group: str) -> Tensors:
        """Return all tensors of a group: name -> read-only array.

        Raises:
            WeightsError: there is no such group, or its file does not match the manifest.
        """
        with self._lock:
            if group not in self._groups:
                entry = self._manifest.files.get(group)
                if entry is None:
                    raise self._missing("tensor group", group, self.groups())
                self._groups[group] = self._load(entry)
            return dict(self._groups[group])

    def tensor(self, group: str, name: str) -> npt.NDArray[Any]:
        """Return one tensor of a group, read-only.

        Raises:
            WeightsError: there is no such group or tensor, or the file does not match the manifest.
        """
        tensors = self.tensors(group)
        if name not in tensors:
            raise self._missing(f"tensor in group {group}", name, tuple(tensors))
        return tensors[name]

    def verify(self) -> None:
        """Check every file of the version now.

        Raises:
            WeightsError: names each file that is wrong and why; ``file`` of the context is the first of them.
        """
        problems: list[WeightsError] = []
        for group in self._manifest.files:
            try:
                self.tensors(group)
            except WeightsError as error:
                problems.append(error)
        for name in self._manifest.documents:
            try:
                self.json(name)
            except WeightsError as error:
                problems.append(error)
        if problems:
            message = "; ".join(error.message for error in problems)
            raise WeightsError(message, version=self.version, file=problems[0].context["file"], num_files=len(problems))

    def _load(self, entry: TensorFile) -> Tensors:
        try:
            tensors = view_tensors(self._verified(entry))
        except ValueError as error:
            raise self._error(entry, [str(error)]) from error
        problems = [f"lacks tensor {name!r}" for name in entry.tensors if name not in tensors]
        for name, array in tensors.items():
            listed = entry.tensors.get(name)
            if listed is None:
                problems.append(f"has tensor {name!r} that the manifest does not list")
            elif (CODES[array.dtype], array.shape) != (listed.dtype, listed.shape):
                held = f"{CODES[array.dtype]} {array.shape}"
                problems.append(f"tensor {name!r} is {held}, the manifest says {listed.dtype} {listed.shape}")
        if problems:
            raise self._error(entry, problems)
        return tensors

    def _verified(self, entry: FileEntry) -> memoryview:
        """Return the bytes of a file after its size and checksum have been found right."""
        try:
            data = self._map(entry) if isinstance(self._fs, LocalFileSystem) else self._fetch(entry)
        except OSError as error:
            raise self._error(entry, [f"cannot be read: {error.strerror or error}"]) from error
        if len(data) != entry.bytes:
            raise self._error(entry, [f"has {len(data)} bytes, the manifest says {entry.bytes}"])
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry.sha256:
            raise self._error(entry, [f"has SHA-256 {digest[:12]}..., the manifest says {entry.sha256[:12]}..."])
        return data

    def _map(self, entry: FileEntry) -> memoryview:
        try:
            path = local_file(self._root, entry.path)
        except ValueError as error:
            raise self._error(entry, [str(error)]) from error
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # mmap refuses empty files
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _fetch(self, entry: FileEntry) -> memoryview:
        path = f"{self._root}/{entry.path}"
        num_bytes = self._fs.info(path)["size"]
        if num_bytes != entry.bytes:  # before fetching: a wrong object may be of any size
            raise self._error(entry, [f"has {num_bytes} bytes, the manifest says {entry.bytes}"])
        return memoryview(self._fs.cat_file(path))

    def _missing(self, kind: str, name: str, known: tuple[str, ...]) -> WeightsError:
        listed = ", ".join(known) or "none"
        message = f"weights {self.version} has no {kind} {name!r}; it has {listed}"
        return WeightsError(message, version=self.version, file=name)

    def _error(self, entry: FileEntry, problems: list[str]) -> WeightsError:
        text = ", ".join(problems)
        return WeightsError(f"weights {self.version}: {entry.path} {text}", version=self.version, file=entry.path)
