"""The safetensors layout, read in place: tensors become views of the file's bytes, nothing is copied.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, begin and end in the data), and
the data. ``safetensors`` itself writes it; its reader copies every tensor, which doubles the memory that a replica
needs for its tables, so the reading side is here.

Source: the format section of the safetensors README.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

HEADER_BYTES_MAX: Final = 100_000_000
"""Limit of the format on its header."""

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""safetensors code -> numpy type; other types travel as integers of their width."""

CODES: Final[dict[np.dtype[Any], str]] = {dtype: code for code, dtype in DTYPES.items()}

_DIMENSIONS_MAX: Final = 64
"""Of an array, by numpy's own limit."""

_WORDS_MAX: Final = 1_000

Tensors: TypeAlias = dict[str, npt.NDArray[Any]]


def view_tensors(data: memoryview) -> Tensors:
    """Return read-only views of the tensors in a safetensors file.

    Args:
        data: The whole file, one byte an item.

    Returns:
        name -> array; the arrays keep ``data`` alive.

    Raises:
        ValueError: the bytes are not a safetensors file, or use a type that is not in ``DTYPES``.
    """
    if len(data) < 8:
        raise ValueError(f"has {len(data)} bytes, a header length takes 8")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > min(HEADER_BYTES_MAX, len(data) - 8):
        raise ValueError(f"header of {header_bytes} bytes does not fit in a file of {len(data)}")
    try:
        header = json.loads(bytes(data[8 : 8 + header_bytes]))
    except RecursionError as error:
        raise ValueError("header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError(f"header must be an object, is {type(header).__name__}")
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    return {name: _view(name, entry, body) for name, entry in header.items()}


def _view(name: str, entry: Any, body: memoryview) -> npt.NDArray[Any]:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, begin, end)
        # Sizes that no array has are refused before they are multiplied: the product alone could take minutes.
        in_bounds = len(shape) <= _DIMENSIONS_MAX and all(type(size) is int and 0 <= size < 2**63 for size in sizes)
        in_bounds = in_bounds and end <= len(body)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"header entry of tensor {name[:100]!r} is not valid: {repr(entry)[:_WORDS_MAX]}") from error
    if not in_bounds or end - begin != dtype.itemsize * math.prod(shape):
        words = f"tensor {name!r} of shape {shape} does not fit bytes {begin} to {end} of {len(body)}"
        raise ValueError(words if len(words) < _WORDS_MAX else f"{words[:_WORDS_MAX]}…")
    array = np.frombuffer(body[begin:end], dtype).reshape(shape)
    array.flags.writeable = False
    return array
