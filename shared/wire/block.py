"""A batch of candidates as one block of bytes: what a client sends and the ingress hands on; docs/wire-format.md."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError
from shared.hashing import ID_CHARS_MAX, canonical_id
from shared.wire.codec import Reader, malformed, possible_digits, refuse, write_floats, write_integers
from shared.wire.columns import TEXT, CandidateBatch, Column, IdLists, Numbers

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of features."""

ID_LISTS, WEIGHTED_ID_LISTS, NUMBERS = 0, 1, 2
"""Kinds of columns."""

_HEAD = struct.Struct("<IIHH")
_BYTE = struct.Struct("<B")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on one batch.

    Args:
        candidates_max: Candidates C.
        features_max: Features that candidates may carry.
        feature_ids_max: Ids of all features together.
    """

    candidates_max: int
    features_max: int
    feature_ids_max: int


def encode_batch(batch: CandidateBatch) -> bytes:
    """Return a batch as a block; its arrays must keep what ``CandidateBatch`` and its columns say of them.

    Raises:
        ValueError: a name, a shape or a text cannot be encoded.
    """
    texts = [text.encode("utf-8") for text in batch.texts]
    out = [_HEAD.pack(len(batch), len(texts), len(batch.features), 0)]
    write_integers(out, batch.integers)
    if texts:
        write_integers(out, np.array([len(text) for text in texts], np.int64))
        out += texts
    floats = {name: values for name, column in batch.features.items() if (values := _floats(column)) is not None}
    digits = dict(zip(floats, possible_digits(list(floats.values())), strict=True))
    # Features of one id a candidate share their offsets, most often: each array of them is written once.
    lengths: dict[int, list[bytes]] = {}
    for name, column in batch.features.items():
        _write_feature(out, name, column, len(batch), digits.get(name, ()), lengths)
    return b"".join(out)


def decode_batch(block: bytes, limits: BatchLimits) -> CandidateBatch:
    """Return the batch that a block holds; whatever the bytes are, memory and time stay within the limits.

    Raises:
        MalformedBodyError: the bytes are not a block.
        InvalidRequestError: a limit is broken; names field, limit and value.
    """
    reader = Reader(block)
    count, num_texts, num_features, reserved = reader.unpack("columns", _HEAD)
    if not 1 <= count <= limits.candidates_max:
        refuse("candidates", f"must be 1 to {limits.candidates_max}, are {count}", limits.candidates_max, count)
    if num_features > limits.features_max:
        refuse("features", f"must be at most {limits.features_max}, are {num_features}", limits.features_max,
               num_features)  # fmt: skip
    if reserved:
        malformed("columns", f"has reserved bits set: {reserved}", 0, reserved)
    integers = reader.integers("candidates", count)
    if int(integers.min()) < TEXT:
        refuse("candidates", f"must be integers of at least 0, hold {integers.min()}", 0, int(integers.min()))
    if (found := int((integers == TEXT).sum())) != num_texts:
        malformed("candidates", f"leave {found} places to texts, there are {num_texts}", found, num_texts)
    texts = _texts(reader, num_texts) if num_texts else ()
    features: dict[str, Column] = {}
    num_left = limits.feature_ids_max
    for _ in range(num_features):
        name, column = _read_feature(reader, count, num_left)
        if name in features:
            refuse(f"features.{name}", "occurs twice", "once", "twice")
        features[name] = column
        if isinstance(column, IdLists):
            num_left -= len(column.ids)
    if reader.num_left:
        malformed("columns", f"has {reader.num_left} bytes after its end", 0, reader.num_left)
    return CandidateBatch(integers, texts, features)


def _floats(column: Column) -> npt.NDArray[np.float32] | None:
    return column.values if isinstance(column, Numbers) else column.weights


def _write_feature(
    out: list[bytes], name: str, column: Column, count: int, digits: Sequence[int], lengths: dict[int, list[bytes]]
) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"a feature's name must match {NAME.pattern}, is {name!r}")
    if isinstance(column, Numbers):
        if column.values.shape != (count,):
            raise ValueError(f"{name} must have {count} numbers, has {column.values.shape}")
        out.append(_named(name, NUMBERS))
        write_floats(out, column.values, digits)
        return
    offsets, weights, num_ids = column.offsets, column.weights, len(column.ids)
    is_whole = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == num_ids
    if not is_whole or (weights is not None and weights.shape != (num_ids,)):
        raise ValueError(f"{name} must have {count + 1} offsets from 0 to {num_ids} and as many weights, if any")
    out.append(_named(name, ID_LISTS if weights is None else WEIGHTED_ID_LISTS))
    if (written := lengths.get(id(offsets))) is None:
        written = lengths[id(offsets)] = []
        write_integers(written, offsets[1:] - offsets[:-1])
    out += written
    write_integers(out, column.ids)
    if weights is not None:
        write_floats(out, weights, digits)


def _named(name: str, kind: int) -> bytes:
    return b"%c%b%c" % (len(name), name.encode("ascii"), kind)


def _read_feature(reader: Reader, count: int, ids_max: int) -> tuple[str, Column]:
    name = reader.raw("features", reader.unpack("features", _BYTE)[0]).decode("latin-1")
    if not NAME.fullmatch(name):
        refuse("features", f"must have names that match {NAME.pattern}, one is {name[:64]!r}", NAME.pattern, name[:64])
    field = f"features.{name}"
    kind = reader.unpack(field, _BYTE)[0]
    if kind == NUMBERS:
        values = reader.floats(field, count)
        if bool(np.isinf(values).any()):
            refuse(field, "must be finite, or NaN for none, is infinite", "finite", "infinite")
        return name, Numbers(values)
    if kind not in (ID_LISTS, WEIGHTED_ID_LISTS):
        malformed(field, f"must be of kind 0, 1 or 2, is {kind}", "0, 1, 2", kind)
    offsets = reader.lengths(field, count, ids_max)
    ids = reader.integers(field, int(offsets[-1]))
    if kind == ID_LISTS:
        return name, IdLists(offsets, ids)
    weights = reader.floats(f"{field}.weights", len(ids))
    if not bool(np.isfinite(weights).all()):
        refuse(f"{field}.weights", "must be finite, are not", "finite", "not finite")
    return name, IdLists(offsets, ids, weights)


def _texts(reader: Reader, count: int) -> tuple[str, ...]:
    """Return the ids that are texts; each in the one form that an id has."""
    ends = reader.lengths("candidates", count, reader.num_left).tolist()
    data = reader.raw("candidates", ends[-1])
    texts = []
    for begin, end in itertools.pairwise(ends):
        try:
            text = data[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                "candidates must be valid UTF-8, one is not", field="candidates", limit="UTF-8", value=str(error)
            ) from error
        if not 1 <= len(text) <= ID_CHARS_MAX:
            refuse("candidates", f"must have 1 to {ID_CHARS_MAX} characters, one has {len(text)}", ID_CHARS_MAX,
                   len(text))  # fmt: skip
        if canonical_id(text) != text:
            refuse("candidates", f"must hold decimal strings as integers, {text} is a text", "integer", text)
        texts.append(text)
    return tuple(texts)
