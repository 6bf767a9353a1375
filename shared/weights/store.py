"""All weights versions of one place: a local folder, or any file system that fsspec has a driver for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shared.clock import Clock, SystemClock
from shared.errors import WeightsError
from shared.log import redact_text
from shared.weights.manifest import (
    CHUNK_BYTES,
    DELTAS_NAME,
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    Derivation,
    Manifest,
    check_version_name,
)
from shared.weights.place import check_place, driver_errors, local_file
from shared.weights.reader import WeightReader
from shared.weights.writer import LOADING_PREFIX, STAGING_PREFIX, WeightWriter

STALE_STAGING_S = 86_400.0
"""Age from which ``prune`` takes a folder in the making for the leftover of a writer or loader that died."""


TOLD_MAX = 5
"""Newest versions that the error of an unknown one names."""


class WeightStore:
    """Lists, opens, writes and prunes versions.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/prefix``.
        clock: Clock of the writers and of ``prune``.
        storage_options: What the driver of the URL needs (credentials, endpoint, timeouts).

    Raises:
        WeightsError: there is no driver for the URL, or it holds credentials that the driver does not take.
    """

    def __init__(
        self, url: str | Path, clock: Clock | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        try:
            check_place(str(url))
            self._fs, root = fsspec.core.url_to_fs(str(url), **(storage_options or {}))
        except (ValueError, ImportError) as error:
            scheme = str(url).partition("://")[0]  # not the whole URL: it may hold credentials
            raise WeightsError(f"weight store {scheme}://... cannot be used: {error}", version=None, file="") from error
        except driver_errors() as error:  # drivers that connect at once
            reason = redact_text(f"{type(error).__name__}: {error}")
            raise WeightsError(
                f"weight store {str(url).partition('://')[0]}://... cannot be used: {reason}", version=None, file=""
            ) from error
        self._root: str = root.rstrip("/")

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system."""
        return self._fs

    @property
    def root(self) -> str:
        """The folder of the versions on that file system."""
        return self._root

    def versions(self) -> list[str]:
        """Return the complete versions, oldest first: manifest valid, every file there and of the right size."""
        return self._survey()[0]

    def incomplete(self) -> dict[str, str]:
        """Return what looks like a version and is not complete: its name -> why."""
        return self._survey()[1]

    def latest(self) -> str:
        """Return the newest complete version.

        Raises:
            WeightsError: there is none.
        """
        versions, broken = self._survey()
        if not versions:
            reasons = "".join(f"; {reason}" for reason in broken.values())
            raise WeightsError(
                f"{redact_text(self._root)} holds no complete version{reasons}", version=None, file=MANIFEST_NAME
            )
        return versions[-1]

    def open(self, version: str) -> WeightReader:
        """Open a version; its files are verified when they are first used (``WeightReader.verify``: all now).

        Raises:
            WeightsError: there is no such version, or its manifest is missing or wrong.
        """
        try:
            check_version_name(version)
        except ValueError as error:
            raise WeightsError(str(error), version=version, file=MANIFEST_NAME) from error
        try:
            return WeightReader(self._fs, f"{self._root}/{version}", self._read_manifest(version))
        except WeightsError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise _error(version, MANIFEST_NAME, f"{error.message.partition(': ')[2]}; {self._in_words()}") from error

    def _in_words(self) -> str:
        """Return where this store is, and the newest of what it holds."""
        place = redact_text(self._root)
        try:
            newest = self.versions()[: -TOLD_MAX - 1 : -1]
        except WeightsError:
            return f"{place} cannot be listed"
        return f"{place} holds {', '.join(newest)}" if newest else f"{place} holds none"

    def writer(
        self, version: str | None = None, chunk_bytes: int = CHUNK_BYTES, derived: Derivation | None = None
    ) -> WeightWriter:
        """Start a new version.

        Args:
            version: Its name; None: made of the time and the content at ``commit``.
            chunk_bytes: Size of the chunks that loaders read and check on their own.
            derived: What the version is made of; None: it was trained.

        Raises:
            WeightsError: the name is not valid, or the store cannot be written.
        """
        return WeightWriter(self._fs, self._root, version, self._clock, chunk_bytes, derived)

    def prune(self, keep: int) -> list[str]:
        """Remove the oldest complete versions with their deltas, and what dead writers and loaders left a day ago.

        The manifest goes first, so a version that is half removed is not listed. A replica that has mapped the files of
        a local store keeps them until it lets go.

        Args:
            keep: Newest complete versions to keep, at least 1.

        Returns:
            The versions that were removed.

        Raises:
            WeightsError: ``keep`` is under 1, or the store refuses.
        """
        if keep < 1:
            raise WeightsError(f"keep must be at least 1, is {keep}", version=None, file="")
        removed = self.versions()[:-keep]
        for version in removed:
            try:
                self._fs.rm_file(f"{self._root}/{version}/{MANIFEST_NAME}")
                for folder in (version, f"{DELTAS_NAME}/{version}"):
                    if self._fs.exists(f"{self._root}/{folder}"):  # an empty prefix of an object store is gone by now
                        self._fs.rm(f"{self._root}/{folder}", recursive=True)
            except OSError as error:
                raise _error(version, "", f"cannot be removed: {error}") from error
        if isinstance(self._fs, LocalFileSystem):
            self._sweep_staging()
        return removed

    def _sweep_staging(self) -> None:
        for path in Path(self._root).glob(".*-*"):
            if not path.name.startswith((STAGING_PREFIX, LOADING_PREFIX)):
                continue
            try:
                # The newest of all: a large file grows for long in a folder that does not change.
                written_s = max(part.stat().st_mtime for part in (path, *path.rglob("*")))
            except FileNotFoundError:  # committed or dropped meanwhile
                continue
            if self._clock.now_s() - written_s > STALE_STAGING_S:
                self._fs.rm(str(path), recursive=True)

    def _read_manifest(self, version: str) -> Manifest:
        path = f"{self._root}/{version}/{MANIFEST_NAME}"
        try:
            if isinstance(self._fs, LocalFileSystem):
                local_file(f"{self._root}/{version}", MANIFEST_NAME)
            data: bytes = self._fs.cat_file(path, start=0, end=MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError as error:
            if self._fs.isdir(f"{self._root}/{version}"):
                raise _error(version, MANIFEST_NAME, f"was never completed, there is no {MANIFEST_NAME}") from error
            raise _error(version, MANIFEST_NAME, "does not exist") from error
        except ValueError as error:
            raise _error(version, MANIFEST_NAME, f"{MANIFEST_NAME} {error}") from error
        except driver_errors() as error:
            reason = redact_text(str(error))
            raise _error(version, MANIFEST_NAME, f"{MANIFEST_NAME} cannot be read: {reason}") from error
        return Manifest.decode(data, version)

    def _survey(self) -> tuple[list[str], dict[str, str]]:
        """Return the complete versions, oldest first, and the broken ones with the reason."""
        complete: list[tuple[str, str]] = []
        broken: dict[str, str] = {}
        for version, sizes in self._listing().items():
            try:
                manifest = self._read_manifest(version)
            except WeightsError as error:
                broken[version] = error.message
                continue
            wrong = [entry.path for entry in manifest.entries() if sizes.get(entry.path) != entry.bytes]
            if wrong:
                broken[version] = f"weights {version}: missing or of the wrong size: {', '.join(wrong)}"
            else:
                complete.append((manifest.created, version))
        return [version for _, version in sorted(complete)], broken

    def _listing(self) -> dict[str, dict[str, int]]:
        """Return version -> path inside it -> bytes, by one listing of the store."""
        try:
            self._fs.invalidate_cache(self._root)  # drivers of object stores remember listings
            found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except driver_errors() as error:
            reason = redact_text(str(error))
            raise WeightsError(f"the weight store cannot be listed: {reason}", version=None, file="") from error
        listing: dict[str, dict[str, int]] = {}
        for path, info in found.items():
            version, _, rest = path[len(self._root) :].lstrip("/").partition("/")
            if rest and not version.startswith(".") and version != DELTAS_NAME:
                listing.setdefault(version, {})[rest] = int(info["size"])
        return listing


def _error(version: str, file: str, reason: str) -> WeightsError:
    return WeightsError(f"weights {version}: {reason}", version=version, file=file)
