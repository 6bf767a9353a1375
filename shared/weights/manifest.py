"""The manifest of one weights version: what is in it, how large, with which checksums.

It is written last, so a version without a readable manifest does not exist for readers. It carries a checksum of
itself: without one a flipped bit in a time or a shape would go unseen.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import WeightsError

FORMAT_VERSION: Final = 2
"""Layout of a version folder that this code writes: 2 adds a checksum a chunk to the checksum a file."""

READABLE: Final = (1, 2)
"""Layouts that this code reads; a file of layout 1 counts as one chunk."""

CHUNK_BYTES: Final = 16 * 2**20
"""Size of a chunk: large enough that a request to an object store costs little beside it, small enough to repeat."""

CHUNK_BYTES_MAX: Final = 2**30
"""Limit on the chunk size of a manifest of layout 2: whoever loads must hold a chunk in memory."""

FILE_BYTES_MAX: Final = 2**50
"""Limit on the size of one file."""

MANIFEST_NAME: Final = "manifest.json"
"""File name of the manifest inside a version folder."""

MANIFEST_BYTES_MAX: Final = 16 * 2**20
"""A larger manifest is refused before it is parsed."""

DELTAS_NAME: Final = "deltas"
"""Folder beside the versions that holds the deltas of each; no version may be called so."""

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_SHA256 = r"^[0-9a-f]{64}$"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*){0,3}")
_NAME_CHARS_MAX = 128


def check_version_name(value: str) -> str:
    """Return the name of a version, one path segment that cannot be hidden or lead elsewhere.

    Raises:
        ValueError: another character than letters, digits, ``_.-``, a leading dot, over 128 characters, or
            ``DELTAS_NAME``.
    """
    if not _VERSION.fullmatch(value):
        raise ValueError(f"version name must match {_VERSION.pattern}, is {value!r}")
    if value == DELTAS_NAME:
        raise ValueError(f"version name must not be {DELTAS_NAME!r}: deltas lie there")
    return value


def check_entry_name(value: str) -> str:
    """Return the name of a tensor group or document: one to four lower-case segments joined by ``/``.

    Raises:
        ValueError: another form, or over 128 characters.
    """
    if len(value) > _NAME_CHARS_MAX or not _NAME.fullmatch(value):
        raise ValueError(f"name must match {_NAME.pattern} and have at most {_NAME_CHARS_MAX} characters, is {value!r}")
    return value


def check_path(value: str) -> str:
    """Return a file path that stays inside its version folder.

    Raises:
        ValueError: an absolute path, a URL, a backslash, a control character, or an empty, ``.`` or ``..`` segment.
    """
    segments = value.split("/")
    if not value.isprintable() or "\\" in value or ":" in value or any(part in ("", ".", "..") for part in segments):
        raise ValueError(f"file path must be relative and stay inside the version, is {value!r}")
    return value


EntryName: TypeAlias = Annotated[str, AfterValidator(check_entry_name)]
VersionName: TypeAlias = Annotated[str, AfterValidator(check_version_name)]
Dtype: TypeAlias = Literal["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(_Part):
    """Type (safetensors code) and shape of one tensor."""

    dtype: Dtype
    shape: tuple[Annotated[int, Field(ge=0)], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a file that is read and checked on its own.

    Args:
        index: Number of the chunk in its file, from 0.
        offset: Where it begins in the file, bytes.
        length: Its bytes.
        sha256: Its SHA-256, 64 hex digits.
    """

    index: int
    offset: int
    length: int
    sha256: str


class FileEntry(_Part):
    """One file of the version: where it lies, its size, its SHA-256 and those of its chunks (64 hex digits each).

    Args:
        path: Relative path inside the version.
        bytes: Size.
        sha256: Checksum of the whole.
        chunk_bytes: Size of all chunks but the last; None in layout 1.
        chunks: Checksum of each chunk, in order; None in layout 1.
    """

    path: Annotated[str, AfterValidator(check_path)]
    bytes: int = Field(ge=0, le=FILE_BYTES_MAX)
    sha256: str = Field(pattern=_SHA256)
    chunk_bytes: int | None = Field(None, ge=1, le=CHUNK_BYTES_MAX)
    chunks: tuple[Annotated[str, Field(pattern=_SHA256)], ...] | None = None

    @model_validator(mode="after")
    def _chunks_fit(self) -> Self:
        if (self.chunk_bytes is None) != (self.chunks is None):
            raise ValueError("chunk_bytes and chunks must be given together")
        if self.chunk_bytes is not None and self.chunks is not None:
            expected = -(-self.bytes // self.chunk_bytes)
            if len(self.chunks) != expected:
                raise ValueError(
                    f"{self.bytes} bytes in chunks of {self.chunk_bytes} must have {expected} checksums, "
                    f"have {len(self.chunks)}"
                )
        return self

    def pieces(self) -> tuple[Chunk, ...]:
        """Return the chunks of the file, in order; none of an empty file, one of a file of layout 1."""
        if not self.bytes:
            return ()
        if self.chunk_bytes is None or self.chunks is None:
            return (Chunk(0, 0, self.bytes, self.sha256),)
        size = self.chunk_bytes
        return tuple(
            Chunk(index, index * size, min(size, self.bytes - index * size), sha256)
            for index, sha256 in enumerate(self.chunks)
        )


class TensorFile(FileEntry):
    """One safetensors file: a group of tensors that are used together."""

    tensors: dict[str, TensorEntry]


class Derivation(_Part):
    """Where a version comes from that was not trained but made of another one.

    Args:
        parent: The version that it was made of.
        made_by: What made it, e.g. ``simplify``.
    """

    parent: VersionName
    made_by: EntryName


class Manifest(_Part):
    """All of one weights version.

    Args:
        format_version: Layout of the folder, one of ``READABLE``.
        version: Name of the version, the name of its folder.
        created: When it was made, ``2026-11-29T20:14:43.123456Z``.
        files: Tensor group -> its file.
        documents: Document name -> its JSON file.
        derived: What it was made of; None: it was trained.
    """

    format_version: Literal[1, 2] = FORMAT_VERSION
    version: VersionName
    created: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z$")
    files: dict[EntryName, TensorFile]
    documents: dict[EntryName, FileEntry]
    derived: Derivation | None = None

    @model_validator(mode="after")
    def _layout_holds(self) -> Self:
        for entry in self.entries():
            if (entry.chunks is not None) != (self.format_version >= 2):
                raise ValueError(f"{entry.path}: layout {self.format_version} and chunks do not go together")
        return self

    def entries(self) -> list[FileEntry]:
        """Return every file of the version."""
        return [*self.files.values(), *self.documents.values()]

    def encode(self) -> bytes:
        """Return the manifest file: JSON with the checksum of the rest in ``digest``."""
        document = self.model_dump(mode="json", exclude_none=True)
        return json.dumps({**document, "digest": _digest(document)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, version: str) -> Manifest:
        """Parse a manifest file.

        Args:
            data: Bytes of the file.
            version: The version that it must belong to.

        Raises:
            WeightsError: it cannot be read, is of another layout or version, or does not match its checksum.
        """

        def refuse(reason: str) -> WeightsError:
            return WeightsError(f"weights {version}: {MANIFEST_NAME}: {reason}", version=version, file=MANIFEST_NAME)

        if len(data) > MANIFEST_BYTES_MAX:
            raise refuse(f"has {len(data)} bytes, the limit is {MANIFEST_BYTES_MAX}")
        try:
            document: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise refuse(f"is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise refuse(f"must hold an object, has {type(document).__name__}")
        # First of all: a later layout may have other fields, and the reader should learn that, not "extra field".
        if document.get("format_version") not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise refuse(f"has format version {document.get('format_version')!r}, this code reads {readable}")
        digest = document.pop("digest", None)
        try:
            found = _digest(document)
        except RecursionError as error:  # writing takes a little more of the stack than reading did
            raise refuse(f"is not JSON: {error}") from error
        if digest != found:
            raise refuse("does not match its own checksum")
        try:
            manifest = cls.model_validate_json(json.dumps(document))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise refuse(f"{where or 'manifest'}: {first['msg']}") from error
        if manifest.version != version:
            raise refuse(f"belongs to version {manifest.version}")
        return manifest


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
