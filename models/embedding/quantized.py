"""Serving rows in fewer bytes: fp16, int8 and int4, in the layout that FBGEMM's inference operator reads.

An int8 or int4 row is ``[scale fp16][bias fp16][q...]`` and stands for ``scale * q + bias``; int4 packs two values a
byte, the first in the low half. Scale and bias are rounded to fp16 before the values are, so that rounding them costs
nothing but a little room at the ends. The product of an fp16 and a byte is exact in fp32 and the sum rounds once: every
right implementation gives the same bits, and the tests hold FBGEMM to them.

Bytes and largest error for a row of width D whose values span [low, high]::

    fp32   4 D      0
    fp16   2 D      2**-11 of a value
    int8   D + 4    about (high - low) / 510
    int4   D/2 + 4  about (high - low) / 30

Shape letters: R rows, D width, U rows that are read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from models.config import RowType
from shared.errors import WeightsError

HEAD_BYTES = 4
"""Scale and bias in front of an int8 or int4 row."""

_SPILL_ROWS = 1 << 16
"""Rows that are copied at a time on their way to a file."""

_LEVELS: Mapping[RowType, int] = {"int8": 255, "int4": 15}
_STORED: Mapping[RowType, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "int8": np.uint8,
    "int4": np.uint8,
}


def row_length(row_type: RowType, width: int) -> int:
    """Return how many stored elements a row has: D, or bytes for int8 and int4.

    Raises:
        ValueError: an int4 row of odd width.
    """
    if row_type == "int4":
        if width % 2:
            raise ValueError(f"width of int4 rows must be even, is {width}")
        return HEAD_BYTES + width // 2
    return HEAD_BYTES + width if row_type == "int8" else width


def stored_dtype(row_type: RowType) -> np.dtype[Any]:
    """Return the type of a stored element."""
    return np.dtype(_STORED[row_type])


def row_bytes(row_type: RowType, width: int) -> int:
    """Return the bytes of a row."""
    return row_length(row_type, width) * stored_dtype(row_type).itemsize


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A table, or a shard's part of one, as it lies in memory or in a file.

    Args:
        row_type: How rows are stored.
        width: D.
        data: [R, ``row_length``]: float32, float16, or bytes (uint8).

    Raises:
        WeightsError: the array is not what the type and the width say.
    """

    row_type: RowType
    width: int
    data: npt.NDArray[Any]

    def __post_init__(self) -> None:
        length, dtype = row_length(self.row_type, self.width), stored_dtype(self.row_type)
        if self.data.ndim != 2 or self.data.shape[1] != length or self.data.dtype != dtype:
            raise WeightsError(
                f"{self.row_type} rows of width {self.width} must be {dtype} [rows, {length}], "
                f"are {self.data.dtype} {list(self.data.shape)}"
            )

    @classmethod
    def of(cls, weight: npt.NDArray[np.float32], row_type: RowType = "fp32") -> Self:
        """Store a table; fp32 rows are not copied.

        Args:
            weight: float32 [R, D].
            row_type: How.

        Raises:
            WeightsError: a value is not finite, or beyond fp16 in a type that keeps fp16.
        """
        width = weight.shape[1]
        if row_type == "fp32":
            return cls(row_type, width, weight)
        if len(weight) and width and not float(np.abs(weight).max()) <= float(np.finfo(np.float16).max):
            raise WeightsError(f"{row_type} rows must be finite and at most {np.finfo(np.float16).max} in size")
        data = weight.astype(np.float16) if row_type == "fp16" else _quantize(weight, row_type)
        return cls(row_type, width, data)

    @classmethod
    def mapped(cls, path: Path, row_type: RowType, width: int, num_rows: int) -> Self:
        """Map rows from a file, row after row without a header: a table that does not fit is read page by page.

        Raises:
            WeightsError: the file cannot be read or has another size; names both.
        """
        length, dtype = row_length(row_type, width), stored_dtype(row_type)
        expected = num_rows * length * dtype.itemsize
        try:
            found = path.stat().st_size
            if found != expected or not expected:
                raise WeightsError(
                    f"{path} must have {expected} bytes for {num_rows} {row_type} rows of {width}, has {found}",
                    file=str(path),
                )
            return cls(row_type, width, np.memmap(path, dtype, mode="r", shape=(num_rows, length)))
        except OSError as error:
            raise WeightsError(f"cannot map {path}: {error.strerror}", file=str(path)) from error

    def spilled(self, path: Path) -> StoredRows:
        """Write the rows to a file and return them mapped from it, so that memory holds only the pages in use.

        The file is written beside its place and renamed: a half-written one is never mapped.

        Raises:
            WeightsError: the file cannot be written.
        """
        if not self.num_bytes:
            return self
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
                Path(file.name).chmod(0o600)
                for start in range(0, len(self), _SPILL_ROWS):
                    file.write(np.ascontiguousarray(self.data[start : start + _SPILL_ROWS]).data)
            Path(file.name).replace(path)
        except OSError as error:
            raise WeightsError(f"cannot write {path}: {error.strerror}", file=str(path)) from error
        return StoredRows.mapped(path, self.row_type, self.width, len(self))

    def __len__(self) -> int:
        """Number of rows R."""
        return len(self.data)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return len(self.data) * row_bytes(self.row_type, self.width)

    @property
    def is_mapped(self) -> bool:
        """Whether the rows lie in a file."""
        return isinstance(self.data, np.memmap)

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return rows as float32: int64 [U] -> float32 [U, D].

        Raises:
            IndexError: a row is outside the table; numpy's own check, which lets rows count from the end: the callers
                in this package refuse negative ones before.
        """
        found = np.asarray(self.data[rows])
        if self.row_type in ("fp32", "fp16"):
            return found.astype(np.float32, copy=False)
        head = np.ascontiguousarray(found[:, :HEAD_BYTES]).view(np.float16).astype(np.float32)
        packed = found[:, HEAD_BYTES:]
        if self.row_type == "int4":
            values = np.empty((len(found), self.width), np.uint8)
            values[:, 0::2] = packed & np.uint8(15)
            values[:, 1::2] = packed >> np.uint8(4)
        else:
            values = packed
        return values.astype(np.float32) * head[:, :1] + head[:, 1:]

    def rows(self, start: int, step: int) -> StoredRows:
        """Return every ``step``-th row from ``start`` on, a view."""
        return StoredRows(self.row_type, self.width, self.data[start::step])

    def columns(self, start: int, stop: int) -> StoredRows:
        """Return some columns; int8 and int4 rows keep the scale and bias of the whole row, so the values stay.

        Raises:
            ValueError: an int4 row would be cut inside a byte.
        """
        if self.row_type in ("fp32", "fp16"):
            return StoredRows(self.row_type, stop - start, self.data[:, start:stop])
        per_byte = 2 if self.row_type == "int4" else 1
        if start % per_byte or stop % per_byte:
            raise ValueError(f"columns of int4 rows must begin and end at even places, are {start} to {stop}")
        first, last = HEAD_BYTES + start // per_byte, HEAD_BYTES + stop // per_byte
        data = np.concatenate([self.data[:, :HEAD_BYTES], self.data[:, first:last]], axis=1)
        return StoredRows(self.row_type, stop - start, data)


def _quantize(weight: npt.NDArray[np.float32], row_type: RowType) -> npt.NDArray[np.uint8]:
    levels = _LEVELS[row_type]
    low = weight.min(axis=1, keepdims=True, initial=np.inf) if weight.shape[1] else np.zeros((len(weight), 1))
    high = weight.max(axis=1, keepdims=True, initial=-np.inf) if weight.shape[1] else low
    bias = low.astype(np.float16)
    scale = ((high - bias.astype(np.float32)) / np.float32(levels)).astype(np.float16)
    # A constant row has no span, and one below fp16's smallest would divide by 0.
    scale = np.where(scale > 0, scale, np.float16(1.0)).astype(np.float16)
    steps = np.rint((weight - bias.astype(np.float32)) / scale.astype(np.float32))
    values = np.clip(steps, 0, levels).astype(np.uint8)
    if row_type == "int4":
        values = np.bitwise_or(values[:, 0::2], np.left_shift(values[:, 1::2], np.uint8(4)))
    head = np.concatenate([scale, bias], axis=1).view(np.uint8)
    return np.concatenate([head, values], axis=1)
