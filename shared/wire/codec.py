"""Columns of integers and floats as bytes, both ways. Numpy only; docs/wire-format.md is the specification.

An integer column is a base and, of each value's distance to it, as many low bytes as the largest distance needs. The
bytes lie in planes: all lowest bytes, then all second ones. Planes cost nothing to cut and compress well, because the
upper ones hardly vary. Floats that are decimals of a few digits, as logged numbers are, are integers over a power of
ten; others are planes of half or single precision. Nothing is lost either way: the same bits come back.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shared.errors import ContextValue, InvalidRequestError, MalformedBodyError

_MASK = (1 << 64) - 1
_BASE = struct.Struct("<Bq")
_KIND = struct.Struct("<B")
_CONSTANT = struct.Struct("<Bf")
_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_DECIMAL = 16
"""Kind of a float column that is an integer column over 10 ** (kind - 16)."""

_DIGITS_MAX = 6
_POWERS = 10.0 ** np.arange(_DIGITS_MAX + 1)[:, None]
_DECIMALS_MAX = float(2**40)
_SAMPLE = 8

_FLOATS: dict[int, np.dtype[Any]] = {size: np.dtype(f"<f{size}") for size in (2, 4)}


def refuse(field: str, message: str, limit: ContextValue, value: ContextValue) -> NoReturn:
    """Refuse bytes that are well formed and break a limit.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError(f"{field} {message}", field=field, limit=limit, value=value)


def malformed(field: str, message: str, limit: ContextValue, value: ContextValue) -> NoReturn:
    """Refuse bytes that are not the format.

    Raises:
        MalformedBodyError: always.
    """
    raise MalformedBodyError(f"{field} {message}", field=field, limit=limit, value=value)


class Reader:
    """Reads columns from bytes, never beyond their end.

    Args:
        data: The bytes.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def num_left(self) -> int:
        """Bytes that are not read yet."""
        return len(self._data) - self._at

    def skip(self, field: str, count: int) -> int:
        """Move past ``count`` bytes and return where they begin.

        Raises:
            MalformedBodyError: there are fewer.
        """
        if count > self.num_left:
            malformed(field, f"needs {count} bytes, {self.num_left} are left", count, self.num_left)
        begin, self._at = self._at, self._at + count
        return begin

    def raw(self, field: str, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        begin = self.skip(field, count)
        return self._data[begin : begin + count]

    def unpack(self, field: str, layout: struct.Struct) -> tuple[int, ...]:
        """Return the next plain integers."""
        return layout.unpack_from(self._data, self.skip(field, layout.size))

    def integers(self, field: str, count: int) -> npt.NDArray[np.int64]:
        """Return the next integer column: int64 [count].

        Raises:
            MalformedBodyError: it is cut short, or its width is over 8 bytes.
        """
        width, base = self.unpack(field, _BASE)
        if width > 8:
            malformed(field, f"must have a width of at most 8 bytes, has {width}", 8, width)
        if width == 0:
            return np.full(count, base, np.int64)
        values = self._planes(field, count, width, 8).view(np.uint64)
        values += np.uint64(base & _MASK)
        return values.view(np.int64)

    def lengths(self, field: str, count: int, total_max: int) -> npt.NDArray[np.int64]:
        """Return the next integer column as offsets: int64 [count + 1], from 0 to at most ``total_max``.

        Raises:
            MalformedBodyError: a length is negative.
            InvalidRequestError: the lengths add up to more than ``total_max``.
        """
        values = self.integers(field, count)
        offsets = np.zeros(count + 1, np.int64)
        if count:
            least, most = int(values.min()), int(values.max())
            if least < 0:
                malformed(field, f"must hold lengths of at least 0, has {least}", 0, least)
            # Each one first: a sum of huge lengths would wrap.
            if most <= total_max:
                np.cumsum(values, out=offsets[1:])
            if (total := max(most, int(offsets[-1]))) > total_max:
                refuse(field, f"adds up to {total} or more, limit {total_max}", total_max, total)
        return offsets

    def floats(self, field: str, count: int) -> npt.NDArray[np.float32]:
        """Return the next float column: float32 [count].

        Raises:
            MalformedBodyError: it is cut short, or its kind is unknown.
        """
        kind = self.unpack(field, _KIND)[0]
        if kind == 0:
            return np.full(count, np.frombuffer(self.raw(field, 4), "<f4")[0], np.float32)
        if _DECIMAL <= kind <= _DECIMAL + _DIGITS_MAX:
            return _decimal_values(self.integers(field, count), kind - _DECIMAL)
        if kind not in _FLOATS:
            malformed(field, f"must be floats of kind 0, 2, 4 or 16 to 22, is {kind}", "0, 2, 4, 16-22", kind)
        values = self._planes(field, count, kind, kind).view(_FLOATS[kind])
        return np.asarray(values, np.float32)

    def _planes(self, field: str, count: int, width: int, word: int) -> npt.NDArray[np.uint8]:
        """Return ``count`` words of ``word`` bytes, the lower ``width`` of them from the next planes: uint8 flat."""
        begin = self.skip(field, count * width)
        planes = np.frombuffer(self._data, np.uint8, count * width, begin).reshape(width, count)
        values = np.zeros((count, word), np.uint8) if width < word else np.empty((count, word), np.uint8)
        for index in range(width):
            values[:, index] = planes[index]
        return values.reshape(-1)


def write_integers(out: list[bytes], values: npt.NDArray[np.int64]) -> None:
    """Append an integer column: int64 [n]."""
    if not len(values):
        out.append(_BASE.pack(0, 0))
        return
    base = int(values.min())
    span = int(values.max()) - base
    width = (span.bit_length() + 7) // 8
    out.append(_BASE.pack(width, base))
    if width:
        distances = values.view(np.uint64) - np.uint64(base & _MASK)
        word = next(size for size in _WORDS if size >= width)
        _write_planes(out, distances.astype(_WORDS[word]), width)


def write_floats(out: list[bytes], values: npt.NDArray[np.float32]) -> None:
    """Append a float column: float32 [n], in the smallest form that gives back the same bits."""
    bits = values.view(np.uint32)
    if len(values) and bool((bits == bits[0]).all()):
        out.append(_CONSTANT.pack(0, values[0]))
        return
    for digits in _possible_digits(values[:_SAMPLE]):
        if (found := _decimals(values, digits)) is not None:
            out.append(_KIND.pack(_DECIMAL + digits))
            write_integers(out, found)
            return
    with np.errstate(over="ignore"):
        half = values.astype(_FLOATS[2])
    # By value, so that NaN, whose bits may change, goes in full.
    width = 2 if bool((half == values).all()) else 4
    out.append(_KIND.pack(width))
    _write_planes(out, half if width == 2 else np.ascontiguousarray(values, _FLOATS[4]), width)


def _possible_digits(sample: npt.NDArray[np.float32]) -> list[int]:
    """Return which numbers of digits the first values allow, fewest first."""
    scaled = np.rint(sample.astype(np.float64) * _POWERS)
    same = (scaled / _POWERS).astype(np.float32) == sample
    found: list[int] = np.flatnonzero(same.all(axis=1)).tolist()
    return found


def _decimals(values: npt.NDArray[np.float32], digits: int) -> npt.NDArray[np.int64] | None:
    """Return the values times a power of ten, int64, if that gives back the same bits; else None."""
    scaled = np.rint(values.astype(np.float64) * 10.0**digits)
    if not bool((np.abs(scaled) <= _DECIMALS_MAX).all()):  # NaN and infinity too
        return None
    integers = scaled.astype(np.int64)
    same = _decimal_values(integers, digits).view(np.uint32) == values.view(np.uint32)
    return integers if bool(same.all()) else None


def _decimal_values(integers: npt.NDArray[np.int64], digits: int) -> npt.NDArray[np.float32]:
    return (integers / 10.0**digits).astype(np.float32)


def _write_planes(out: list[bytes], words: npt.NDArray[Any], width: int) -> None:
    planes = words.view(np.uint8).reshape(len(words), words.itemsize)
    out.append(np.ascontiguousarray(planes.T[:width]).tobytes())
