"""64-bit hashing and id keys that are the same in every process, on every machine, for ever.

Python's built-in ``hash`` is salted per process; nothing that leaves a process may depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

EntityId: TypeAlias = int | str

ID_MAX = 2**63 - 1
"""Largest integer id that the API accepts."""

ID_CHARS_MAX = 256
"""Most characters of an id that is a text."""

_SIGN = 1 << 63


def hash64(data: bytes, salt: int = 0) -> int:
    """Hash bytes to an unsigned 64-bit integer (BLAKE2b, 8-byte digest).

    Args:
        data: What to hash.
        salt: Domain of the hash, 0 to 2**64 - 1; different salts give independent hashes.

    Returns:
        An integer from 0 to 2**64 - 1.
    """
    digest = hashlib.blake2b(data, digest_size=8, salt=salt.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def canonical_id(value: EntityId) -> EntityId:
    """Return the one form of an id: a decimal string within range is the integer it spells.

    ``"42"`` and ``42`` are the same entity; ``"042"`` and ``"a"`` are strings and stay so.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and (value == "0" or value[0] != "0"):
        number = int(value) if len(value) <= 19 else ID_MAX + 1
        if number <= ID_MAX:
            return number
    return value


def id_key(value: EntityId) -> int:
    """Map an id to its signed 64-bit key.

    Integers 0 .. 2**63 - 1 are their own key; strings get a negative key from ``hash64``: the two kinds never meet.
    """
    value = canonical_id(value)
    if isinstance(value, int):
        return value
    return (hash64(value.encode("utf-8", "surrogatepass")) & ~_SIGN) - _SIGN


def id_keys(values: Sequence[EntityId]) -> npt.NDArray[np.int64]:
    """Map ids to keys: list of N ids -> int64 array of shape [N]."""
    try:
        keys = np.array(values, dtype=np.int64)  # all ints: one C loop
        if not any(isinstance(value, str) for value in values):
            return keys
    except (ValueError, OverflowError, TypeError):
        pass
    return np.fromiter((id_key(value) for value in values), dtype=np.int64, count=len(values))


def store_token(value: EntityId) -> str:
    """Return an ASCII token for an id that is safe inside a store key and distinct for distinct ids.

    Integers become ``i<decimal>``; strings become ``s<hex of UTF-8>`` (no separator, newline or NUL can leak in).
    """
    value = canonical_id(value)
    if isinstance(value, int):
        return f"i{value}"
    return "s" + value.encode("utf-8", "surrogatepass").hex()


def mix_keys(keys: npt.NDArray[np.int64], salt: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash keys to unsigned 64-bit integers, a whole array at once.

    Two rounds of the splitmix64 finaliser with the salt between them: a bijection for every salt, so distinct keys
    never share a hash, and each bit of key and salt reaches every bit of the result. Not for hostile input.

    Args:
        keys: int64 of any shape.
        salt: Domain of the hash, 0 to 2**64 - 1, e.g. from ``hash64``; or one for each key.

    Returns:
        uint64 of that shape.

    Raises:
        OverflowError: the salt does not fit 64 bits.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (variant 13 by D. Stafford).
    """
    mixed = np.asarray(keys, np.int64).view(np.uint64) + _GOLDEN_GAMMA
    spare = np.empty_like(mixed)
    _finalise(mixed, spare)
    mixed ^= np.uint64(salt) if isinstance(salt, int) else salt
    _finalise(mixed, spare)
    return mixed


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def _finalise(bits: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> None:
    for shift, factor in _ROUNDS:
        bits ^= np.right_shift(bits, shift, out=spare)
        bits *= factor
    bits ^= np.right_shift(bits, _LAST_SHIFT, out=spare)
