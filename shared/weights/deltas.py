"""Deltas: what changed in a version's tensors since the step before, as ordered, checksummed records.

A version and its deltas 1, 2, 3, ... are a series of states, each with a stamp: ``<version>`` is the state as
published, ``<version>+7`` the one after delta 7. A delta names its version, its number and the checksum of the delta
before it, so that one of another series, one too many, one too few and one that was replaced are each found out by
name. Values are moved as bytes, never computed with: a version plus its deltas is the trainer's state bit for bit.

A file is an envelope of 24 bytes (``RMDELTA1``, CRC-32 of the payload, 0, length of the payload) and a payload in the
safetensors layout, whose metadata hold what is not a tensor.

Source: Monolith (arXiv 2209.07663) for sending touched rows only; numbering, chaining and inverses are ours.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.weights.errors import DeltaDamagedError, DeltaError, DeltaShapeError
from shared.weights.layout import CODES, Tensors, view_tensors
from shared.weights.manifest import check_version_name

SEQUENCE_MAX: Final = 99_999_999
"""Largest number of a delta."""

_MAGIC: Final = b"RMDELTA1"
_ENVELOPE: Final = struct.Struct("<8sIIQ")
ENVELOPE_BYTES: Final = _ENVELOPE.size
_STAMP: Final = re.compile(r"(?P<base>[^+]+)(?:\+(?P<sequence>[1-9][0-9]{0,7}))?")

Array: TypeAlias = npt.NDArray[Any]
TensorSpec: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""Type and shape of a tensor."""


def version_stamp(base: str, sequence: int) -> str:
    """Return the name of a state: ``v`` as published, ``v+7`` after seven deltas."""
    return f"{base}+{sequence}" if sequence else base


def parse_stamp(stamp: str) -> tuple[str, int]:
    """Return base and sequence of a stamp.

    Raises:
        ValueError: it is no stamp.
    """
    match = _STAMP.fullmatch(stamp)
    if match is None:
        raise ValueError(f"stamp must be VERSION or VERSION+NUMBER, is {stamp!r}")
    return check_version_name(match["base"]), int(match["sequence"] or 0)


def tensor_key(group: str, name: str) -> str:
    """Return the key of a tensor in a delta: ``tables/item`` and ``weight`` -> ``tables/item/weight``."""
    return f"{group}/{name}"


def split_key(key: str) -> tuple[str, str]:
    """Return group and name of a key."""
    group, _, name = key.rpartition("/")
    return group, name


@dataclass(frozen=True, slots=True)
class RowDelta:
    """New values of some rows of one tensor.

    Args:
        ids: int64 [N], strictly ascending rows.
        values: [N, ..], the rows as they are from now on.
    """

    ids: npt.NDArray[np.int64]
    values: Array


@dataclass(frozen=True)
class Delta:
    """One step.

    Args:
        base: The version that the series begins with.
        sequence: Number of the step, from 1.
        previous: CRC-32 of the delta before, 0 for the first.
        created: When it was made, ISO 8601 in UTC.
        rows: Tensor key -> changed rows.
        whole: Tensor key -> new tensor.
        documents: Name -> new JSON document, for documents that tell what tensors must answer (``golden``).
    """

    base: str
    sequence: int
    previous: int
    created: str
    rows: dict[str, RowDelta] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def stamp(self) -> str:
        """Stamp of the state after this step."""
        return version_stamp(self.base, self.sequence)

    @property
    def num_rows(self) -> int:
        """Changed rows of all tensors."""
        return sum(len(part.ids) for part in self.rows.values())

    @cached_property
    def payload(self) -> bytes:
        """The record without its envelope: the same for the same content, in every process.

        Raises:
            DeltaShapeError: a type is not in ``layout.DTYPES``, or ids do not fit their values.
        """
        head, arrays = self._laid_out()
        return b"".join([head, *(array.tobytes() for array in arrays)])

    def _laid_out(self) -> tuple[bytes, list[Array]]:
        """Return the payload's bytes before the tensors, and the tensors as they follow."""
        tensors: Tensors = {}
        for key, part in self.rows.items():
            if part.ids.dtype != np.int64 or part.ids.ndim != 1 or len(part.ids) != len(part.values):
                ids = f"{part.ids.dtype} {part.ids.shape}"
                raise self._misfit(key, f"ids must be int64 [N] for N = {len(part.values)} rows, are {ids}")
            if len(part.ids) and (int(part.ids[0]) < 0 or bool((np.diff(part.ids) <= 0).any())):
                raise self._misfit(key, "ids must be at least 0 and strictly ascending")
            tensors[f"ids:{key}"], tensors[f"rows:{key}"] = part.ids, part.values
        tensors |= {f"whole:{key}": array for key, array in self.whole.items()}
        about = {
            "base": self.base,
            "sequence": self.sequence,
            "previous": self.previous,
            "created": self.created,
            "documents": self.documents,
        }
        return _layout(tensors, about, self)

    @cached_property
    def crc(self) -> int:
        """CRC-32 of the payload."""
        return zlib.crc32(self.payload)

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return _ENVELOPE.pack(_MAGIC, self.crc, 0, len(self.payload)) + self.payload

    @classmethod
    def decode(cls, data: bytes, base: str, sequence: int) -> Delta:
        """Parse a file; its arrays are views of ``data``.

        Args:
            data: All of it.
            base: The version that it should belong to, for messages.
            sequence: The number that it should have, for messages.

        Raises:
            DeltaDamagedError: truncated, a wrong checksum, or no delta.
        """

        def refuse(reason: str, **context: int) -> DeltaDamagedError:
            return DeltaDamagedError(
                f"delta {version_stamp(base, sequence)}: {reason}", version=base, sequence=sequence, **context
            )

        crc, length = read_envelope(data, base, sequence)
        payload = data[ENVELOPE_BYTES:]
        if len(payload) != length:
            raise refuse(f"has {len(payload)} bytes, its envelope says {length}", expected=length, found=len(payload))
        if (found := zlib.crc32(payload)) != crc:
            raise refuse(f"has CRC-32 {found:08x}, its envelope says {crc:08x}", expected=crc, found=found)
        try:
            return cls._parse(payload, crc)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, DeltaError) as error:
            raise refuse(f"cannot be read: {error}") from error

    @classmethod
    def _parse(cls, payload: bytes, crc: int) -> Delta:
        header_bytes = int.from_bytes(payload[:8], "little")
        about = json.loads(json.loads(payload[8 : 8 + header_bytes])["__metadata__"]["delta"])
        rows: dict[str, RowDelta] = {}
        whole: dict[str, Array] = {}
        tensors = view_tensors(memoryview(payload))
        for name, array in tensors.items():
            kind, _, key = name.partition(":")
            if kind == "rows":
                rows[key] = RowDelta(tensors[f"ids:{key}"], array)
            elif kind == "whole":
                whole[key] = array
        delta = cls(
            check_version_name(about["base"]),
            int(about["sequence"]),
            int(about["previous"]),
            str(about["created"]),
            rows,
            whole,
            dict(about["documents"]),
        )
        # What was read is what would be written: no second form, ids ascending. The bytes before the tensors say where
        # each of them lies, so those of the tensors need not be laid out again to be compared.
        head, arrays = delta._laid_out()
        if not payload.startswith(head) or len(payload) != len(head) + sum(array.nbytes for array in arrays):
            raise ValueError("it is not in the form that this code writes")
        vars(delta).update(payload=payload, crc=crc)
        return delta

    def check_fit(self, specs: Mapping[str, TensorSpec]) -> None:
        """Check that every tensor of the delta fits the weights that it is for.

        Args:
            specs: Tensor key -> type and shape, of all that there is.

        Raises:
            DeltaShapeError: unknown tensor, other type or shape, row out of range; names tensor, limit and value.
        """
        for key, array in self.whole.items():
            dtype, shape = self._spec(key, specs)
            if (array.dtype, array.shape) != (dtype, shape):
                raise self._misfit(key, f"is {array.dtype} {array.shape}, the weights have {dtype} {shape}")
        for key, part in self.rows.items():
            dtype, shape = self._spec(key, specs)
            if (part.values.dtype, part.values.shape[1:]) != (dtype, shape[1:]) or not shape:
                found = f"{part.values.dtype} {part.values.shape[1:]}"
                raise self._misfit(key, f"has rows of {found}, the weights have {dtype} {shape[1:]}")
            if len(part.ids) and not 0 <= int(part.ids[0]) <= int(part.ids[-1]) < shape[0]:
                worst = int(part.ids[-1]) if part.ids[-1] >= shape[0] else int(part.ids[0])
                raise self._misfit(key, f"row must be in [0, {shape[0]}), is {worst}", limit=shape[0], value=worst)

    def check_numbers(self) -> None:
        """Check that values are numbers, before any of them serves; costs a pass over the changed values.

        Raises:
            DeltaShapeError: a row is not finite, or a whole tensor has a NaN; names tensor and row.
        """
        for key, part in self.rows.items():
            if part.values.dtype.kind == "f" and not bool(np.isfinite(part.values).all()):
                finite = np.isfinite(part.values).reshape(len(part.ids), -1).all(axis=1)
                worst = int(part.ids[int(np.argmin(finite))])
                raise self._misfit(key, f"row {worst} must be finite", value=worst)
        for key, array in self.whole.items():
            if array.dtype.kind == "f" and bool(np.isnan(array).any()):
                raise self._misfit(key, "must not hold NaN")

    def _spec(self, key: str, specs: Mapping[str, TensorSpec]) -> TensorSpec:
        if key not in specs:
            raise self._misfit(key, "the weights have no such tensor")
        return specs[key]

    def _misfit(self, key: str, reason: str, **context: int) -> DeltaShapeError:
        message = f"delta {self.stamp}: {key}: {reason}"
        return DeltaShapeError(message, version=self.base, sequence=self.sequence, tensor=key, **context)


def read_envelope(data: bytes, base: str, sequence: int) -> tuple[int, int]:
    """Return CRC-32 and length of the payload from the first ``ENVELOPE_BYTES`` of a file.

    Raises:
        DeltaDamagedError: they are no envelope.
    """
    reason = ""
    if len(data) < ENVELOPE_BYTES:
        reason = f"has {len(data)} bytes, an envelope takes {ENVELOPE_BYTES}"
    else:
        magic, crc, zero, length = _ENVELOPE.unpack_from(data)
        if magic != _MAGIC or zero:
            reason = f"does not begin as a delta: {magic!r}"
    if reason:
        message = f"delta {version_stamp(base, sequence)}: {reason}"
        raise DeltaDamagedError(message, version=base, sequence=sequence, found=len(data))
    return int(crc), int(length)


def _layout(tensors: Tensors, about: dict[str, Any], delta: Delta) -> tuple[bytes, list[Array]]:
    """Return the safetensors layout of tensors in order of their names, aligned to 8 bytes: its beginning, and them."""
    header: dict[str, Any] = {"__metadata__": {"delta": json.dumps(about, sort_keys=True, allow_nan=False)}}
    arrays, position = [], 0
    for name in sorted(tensors):
        array = tensors[name]
        if array.dtype not in CODES:
            raise delta._misfit(name, f"type {array.dtype} is not among {', '.join(map(str, CODES))}")
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        arrays.append(array)
        position += array.nbytes
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, arrays


def changed_rows(old: Array, new: Array) -> npt.NDArray[np.int64]:
    """Return the rows whose bits differ, ascending: [R, ..] twice -> int64 [N].

    The same NaN is equal to itself, 0 is not -0.
    """
    if not old.size:
        return np.zeros(0, np.int64)
    width = math.prod(old.shape[1:])
    left, right = (_bits(array).reshape(len(array), width) for array in (old, new))
    return np.flatnonzero((left != right).any(axis=1)).astype(np.int64)


def same_bits(old: Array, new: Array) -> bool:
    """Return whether two arrays of one type and shape have the same bits."""
    return bool(np.array_equal(_bits(old), _bits(new)))


def _bits(array: Array) -> Array:
    """Return the array as unsigned integers of its item size."""
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
