"""Columns of integers and floats as bytes, both ways. Numpy only; docs/wire-format.md is the specification.

An integer column is a base and, of each value's distance to it, as many low bytes as the largest distance needs. The
bytes lie in planes: all lowest bytes, then all second ones. Planes cost nothing to cut and compress well, because the
upper ones hardly vary. Floats that are decimals of a few digits, as logged numbers are, are integers over a power of
ten; others are planes of half or single precision. Nothing is lost either way: the same bits come back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shared.errors import ContextValue, InvalidRequestError, MalformedBodyError

_MASK = (1 << 64) - 1
_BASE = struct.Struct("<Bq")
_KIND = struct.Struct("<B")
_CONSTANT = struct.Struct("<Bf")
_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_WORD_OF = (0, 1, 2, 4, 4, 8, 8, 8, 8)
"""Bytes of the smallest word that holds so many bytes."""

_DECIMAL = 16
"""Kind of a float column that is an integer column over 10 ** (kind - 16)."""

_DIGITS_MAX = 6
_POWERS = 10.0 ** np.arange(_DIGITS_MAX + 1)[:, None, None]
_DECIMALS_MAX = float(2**40)
_EMPTY_FLOATS = _KIND.pack(_DECIMAL) + _BASE.pack(0, 0)
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
        values = self._planes(field, count, width).astype(np.int64)
        if base:
            values += base  # modulo 2^64, as the format says
        return values

    def lengths(self, field: str, count: int, total_max: int) -> npt.NDArray[np.int64]:
        """Return the next integer column as offsets: int64 [count + 1], from 0 to at most ``total_max``.

        Raises:
            MalformedBodyError: a length is negative.
            InvalidRequestError: the lengths add up to more than ``total_max``.
        """
        values = self.integers(field, count)
        offsets = np.zeros(count + 1, np.int64)
        if count:
            least, most = int(np.minimum.reduce(values)), int(np.maximum.reduce(values))
            if least < 0:
                malformed(field, f"must hold lengths of at least 0, has {least}", 0, least)
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
        return np.asarray(self._planes(field, count, kind).view(_FLOATS[kind]), np.float32)

    def _planes(self, field: str, count: int, width: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return ``count`` words of the next ``width`` planes, in the smallest word that holds them."""
        begin = self.skip(field, count * width)
        planes = np.frombuffer(self._data, np.uint8, count * width, begin)
        if width == 1:
            return planes
        word = _WORDS[_WORD_OF[width]]
        values = planes[:count].astype(word)
        for index in range(1, width):
            values |= planes[index * count : (index + 1) * count].astype(word) << word.type(8 * index)
        return values


def write_integers(out: list[bytes], values: npt.NDArray[np.int64]) -> None:
    """Append an integer column: int64 [n]."""
    if not len(values):
        out.append(_BASE.pack(0, 0))
        return
    # As unsigned ones, below zero is above all else. One value far enough below shows that no base saves a byte.
    most, one = int(np.maximum.reduce(values.view(np.uint64))), int(values[0])
    if 0 <= one <= most < 1 << 63 and _bytes_of(most - one) == _bytes_of(most):
        _write_distances(out, values, 0, most)
        return
    least = int(np.minimum.reduce(values))
    _write_distances(out, values, least, int(np.maximum.reduce(values)))


def possible_digits(columns: Sequence[npt.NDArray[np.float32]]) -> list[list[int]]:
    """Return which numbers of decimal digits the first values of each column allow, fewest first.

    For ``write_floats``: all columns of a request cost hardly more than one, because numpy's calls do, not the values.
    """
    sample = np.zeros((len(columns), _SAMPLE), np.float32)
    for row, values in zip(sample, columns, strict=True):
        row[: len(values)] = values[:_SAMPLE]
    scaled = np.rint(sample.astype(np.float64) * _POWERS)
    same = (scaled / _POWERS).astype(np.float32) == sample
    return [[digits for digits, fits in enumerate(row) if fits] for row in same.all(axis=2).T.tolist()]


def write_floats(
    out: list[bytes], values: npt.NDArray[np.float32], digits_possible: Iterable[int] | None = None
) -> None:
    """Append a float column in the smallest form that gives back the same bits.

    Args:
        out: Takes the bytes.
        values: float32 [n].
        digits_possible: What ``possible_digits`` found for the column; None: found here.
    """
    if not len(values):
        out.append(_EMPTY_FLOATS)
        return
    # Python's floats from here on; both are NaN if one value is.
    least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if least == most and bool((values.view(np.uint32) == values.view(np.uint32)[0]).all()):
        out.append(_CONSTANT.pack(0, values[0]))
        return
    for digits in possible_digits([values])[0] if digits_possible is None else digits_possible:
        if _write_decimals(out, values, digits, least, most):
            return
    with np.errstate(over="ignore"):
        half = values.astype(_FLOATS[2])
    # By value, so that NaN, whose bits may change, goes in full.
    width = 2 if bool((half == values).all()) else 4
    out.append(_KIND.pack(width))
    _write_planes(out, half if width == 2 else np.ascontiguousarray(values, _FLOATS[4]), width)


def _write_decimals(out: list[bytes], values: npt.NDArray[np.float32], digits: int, least: float, most: float) -> bool:
    """Append the values times a power of ten, if that gives back the same bits; else nothing and return False."""
    power = 10.0**digits
    if not max(-least, most) * power <= _DECIMALS_MAX:  # NaN and infinity too
        return False
    scaled = np.multiply(values, power, dtype=np.float64)
    np.rint(scaled, out=scaled)
    if least <= 0.0:
        scaled += 0.0  # no integer is -0.0, so it must not compare as one
    # What a decoder does, on the floats that the integers are; bytes compare faster than arrays.
    if (scaled / power).astype(np.float32).tobytes() != values.tobytes():
        return False
    base, end = round(least * power), round(most * power)
    out.append(_KIND.pack(_DECIMAL + digits))
    narrow = np.int32 if base >= -(2**31) and end < 2**31 else np.int64
    _write_distances(out, scaled.astype(narrow), base, end)
    return True


def _decimal_values(integers: npt.NDArray[np.int64], digits: int) -> npt.NDArray[np.float32]:
    return (integers / 10.0**digits).astype(np.float32)


def _bytes_of(distance: int) -> int:
    return (distance.bit_length() + 7) // 8


def _write_distances(out: list[bytes], values: npt.NDArray[np.signedinteger[Any]], least: int, most: int) -> None:
    """Append an integer column between these bounds, which one value each has, or ``least`` is 0."""
    width = _bytes_of(most - least)
    base = 0 if least >= 0 and _bytes_of(most) == width else least
    out.append(_BASE.pack(width, base))
    if not width:
        return
    # Low bytes of a distance need low bytes alone: narrow first, subtract modulo the word.
    word = _WORDS[_WORD_OF[width]]
    distances = values.astype(word)
    if base:
        distances -= word.type(base & ((1 << (8 * word.itemsize)) - 1))
    _write_planes(out, distances, width)


def _write_planes(out: list[bytes], words: npt.NDArray[Any], width: int) -> None:
    if words.itemsize == 1:
        out.append(words.tobytes())
        return
    out.append(words.view(np.uint8).reshape(len(words), words.itemsize).T[:width].tobytes())
