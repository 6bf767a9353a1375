"""The deltas of a version as files beside the versions: ``deltas/<version>/00000001.delta``."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsspec.implementations.local import LocalFileSystem

from shared.errors import WeightsError
from shared.weights.deltas import ENVELOPE_BYTES, SEQUENCE_MAX, Delta, read_envelope, version_stamp
from shared.weights.errors import DeltaDamagedError, DeltaError, DeltaGapError, DeltaRepeatedError
from shared.weights.manifest import DELTAS_NAME, check_version_name
from shared.weights.place import local_file
from shared.weights.state import check_next
from shared.weights.store import WeightStore
from shared.weights.writer import sync_folder

DELTA_BYTES_MAX: Final = 2**30
"""A larger delta is refused: publish a version."""

_FILE = re.compile(r"(\d{8})\.delta")


class DeltaLog:
    """Reads and appends the deltas of one version.

    Args:
        store: Store of the version.
        base: The version.
        bytes_max: Largest delta that is written or read.

    Raises:
        WeightsError: ``base`` is no version name.
    """

    def __init__(self, store: WeightStore, base: str, bytes_max: int = DELTA_BYTES_MAX) -> None:
        try:
            check_version_name(base)
        except ValueError as error:
            raise WeightsError(str(error), version=base, file="") from error
        self.base = base
        self._fs = store.fs
        self._folder = f"{store.root}/{DELTAS_NAME}/{base}"
        self._bytes_max = bytes_max

    def sequences(self) -> list[int]:
        """Return the numbers of the deltas that are there, ascending; holes show."""
        try:
            self._fs.invalidate_cache(self._folder)
            names: list[str] = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._error(0, f"cannot be listed: {error}") from error
        found = (_FILE.fullmatch(name.rpartition("/")[2]) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def last(self) -> tuple[int, int]:
        """Return number and CRC-32 of the newest delta, (0, 0) when there is none.

        Raises:
            DeltaError: it cannot be read.
        """
        sequences = self.sequences()
        if not sequences:
            return 0, 0
        head = self._read(sequences[-1], ENVELOPE_BYTES)
        return sequences[-1], read_envelope(head, self.base, sequences[-1])[0]

    def append(self, delta: Delta) -> None:
        """Write the next delta; it is there whole or not at all, and never replaces another.

        Raises:
            DeltaError: it is not the next one, too large, holds what is no number, or the place is taken; nothing is
                written then.
            WeightsError: the store refuses.
        """
        check_next(delta, self.base, *self.last())
        delta.check_numbers()  # once it is in the log, no later delta gets past it
        data = delta.encode()
        if len(data) > self._bytes_max or delta.sequence > SEQUENCE_MAX:
            reason = f"has {len(data)} bytes and number {delta.sequence}, limits {self._bytes_max} and {SEQUENCE_MAX}"
            raise DeltaError(f"delta {delta.stamp}: {reason}", version=self.base, sequence=delta.sequence)
        try:
            self._fs.makedirs(self._folder, exist_ok=True)
            if isinstance(self._fs, LocalFileSystem):
                _write_new(Path(self._path(delta.sequence)), data)
            else:
                self._fs.pipe_file(self._path(delta.sequence), data, mode="create")
        except FileExistsError as error:
            message = f"delta {delta.stamp} exists already: another writer was faster"
            raise DeltaRepeatedError(message, version=self.base, sequence=delta.sequence) from error
        except OSError as error:
            raise self._error(delta.sequence, f"cannot be written: {error}") from error

    def read(self, sequence: int) -> Delta:
        """Return one delta.

        Raises:
            DeltaGapError: it is not there.
            DeltaDamagedError: it is not what was written, or lies in another's place.
        """
        data = self._read(sequence, self._bytes_max + 1)
        if len(data) > self._bytes_max:
            raise self._damaged(sequence, f"is larger than the limit of {self._bytes_max} bytes")
        delta = Delta.decode(data, self.base, sequence)
        if (delta.base, delta.sequence) != (self.base, sequence):
            raise self._damaged(sequence, f"holds delta {delta.stamp}")
        return delta

    def since(self, sequence: int, limit: int = SEQUENCE_MAX) -> Iterator[Delta]:
        """Yield the deltas after ``sequence``, in order, at most ``limit``.

        Raises:
            DeltaGapError: one is missing while later ones are there: take a full snapshot.
            DeltaDamagedError: one is not what was written.
        """
        newer = [number for number in self.sequences() if number > sequence][:limit]
        for expected, found in enumerate(newer, sequence + 1):
            if found != expected:
                message = f"delta {expected} of {self.base} is missing, {found} is there: a full snapshot is needed"
                raise DeltaGapError(message, version=self.base, sequence=found, expected=expected, found=found)
            yield self.read(expected)

    def _path(self, sequence: int) -> str:
        return f"{self._folder}/{sequence:08d}.delta"

    def _read(self, sequence: int, num_bytes: int) -> bytes:
        path = self._path(sequence)
        try:
            if isinstance(self._fs, LocalFileSystem):
                local_file(self._folder, path.rpartition("/")[2])
            data: bytes = self._fs.cat_file(path, start=0, end=num_bytes)
        except ValueError as error:
            raise self._damaged(sequence, str(error)) from error
        except FileNotFoundError as error:
            message = f"delta {version_stamp(self.base, sequence)} is missing: a full snapshot is needed"
            raise DeltaGapError(
                message, version=self.base, sequence=sequence, expected=sequence, found="nothing"
            ) from error
        except OSError as error:
            raise self._error(sequence, f"cannot be read: {error}") from error
        return data

    def _damaged(self, sequence: int, reason: str) -> DeltaDamagedError:
        message = f"delta {version_stamp(self.base, sequence)}: {reason}"
        return DeltaDamagedError(message, version=self.base, sequence=sequence)

    def _error(self, sequence: int, reason: str) -> WeightsError:
        what = f"delta {version_stamp(self.base, sequence)}" if sequence else f"deltas of {self.base}"
        return WeightsError(f"{what}: {reason}", version=self.base, file=self._folder)


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist: whole, on disk, and visible in one step."""
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename, refused when the name is taken
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
