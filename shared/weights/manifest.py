"""The manifest of one weights version: what is in it, how large, with which checksums.

It is written last, so a version without a readable manifest does not exist for readers. It carries a checksum of
itself: without one a flipped bit in a time or a shape would go unseen.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shared.errors import WeightsError

FORMAT_VERSION: Final = 1
"""Layout of a version folder that this code reads and writes."""

MANIFEST_NAME: Final = "manifest.json"
"""File name of the manifest inside a version folder."""

MANIFEST_BYTES_MAX: Final = 16 * 2**20
"""A larger manifest is refused before it is parsed."""

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*){0,3}")
_NAME_CHARS_MAX = 128


def check_version_name(value: str) -> str:
    """Return the name of a version, one path segment that cannot be hidden or lead elsewhere.

    Raises:
        ValueError: another character than letters, digits, ``_.-``, a leading dot, or over 128 characters.
    """
    if not _VERSION.fullmatch(value):
        raise ValueError(f"version name must match {_VERSION.pattern}, is {value!r}")
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


class FileEntry(_Part):
    """One file of the version: where it lies, its size and its SHA-256 (64 hex digits)."""

    path: Annotated[str, AfterValidator(check_path)]
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TensorFile(FileEntry):
    """One safetensors file: a group of tensors that are used together."""

    tensors: dict[str, TensorEntry]


class Manifest(_Part):
    """All of one weights version.

    Args:
        format_version: Layout of the folder, ``FORMAT_VERSION``.
        version: Name of the version, the name of its folder.
        created: When it was made, ``2026-11-29T20:14:43.123456Z``.
        files: Tensor group -> its file.
        documents: Document name -> its JSON file.
    """

    format_version: Literal[1] = FORMAT_VERSION
    version: VersionName
    created: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z$")
    files: dict[EntryName, TensorFile]
    documents: dict[EntryName, FileEntry]

    def entries(self) -> list[FileEntry]:
        """Return every file of the version."""
        return [*self.files.values(), *self.documents.values()]

    def encode(self) -> bytes:
        """Return the manifest file: JSON with the checksum of the rest in ``digest``."""
        document = self.model_dump(mode="json")
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
        if document.get("format_version") != FORMAT_VERSION:
            raise refuse(f"has format version {document.get('format_version')!r}, this code reads {FORMAT_VERSION}")
        digest = document.pop("digest", None)
        if digest != _digest(document):
            raise refuse("does not match its own checksum")
        try:
            manifest = cls.model_validate_json(json.dumps(document))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise refuse(f"{where}: {first['msg']}") from error
        if manifest.version != version:
            raise refuse(f"belongs to version {manifest.version}")
        return manifest


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
