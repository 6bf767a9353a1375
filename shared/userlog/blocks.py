"""How events lie in the store: blocks of compact columns, little-endian, and their decoding with numpy.

A block of n events is a header of 28 bytes and five columns:

| column | bytes |
| --- | --- |
| event ids | 6 n: 48 bits of the key of each id |
| times | n - 1 varints: seconds since the event before; the header has the first time and the last |
| items | n varints: the 64-bit key of each item |
| weights | n varints: four times a weight of half points, else twice the bits of the float32, plus 1 |
| sources | nothing where all are equal (the header has it), else n bytes |

A varint has seven bits a byte, the lowest first, and the eighth bit where another byte follows. Appended events are
encoded by the store (``scripts``), whole histories here, to the same bytes. Readers decode all blocks of all users of a
reply at once.

A record of fixed size took 28 bytes an event without a source, this 10.6 on MovieLens, 6 of which are the id that
makes an append idempotent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.errors import DamagedLogError

FORMAT_VERSION: Final = 2
"""Version 1 was one string of fixed records; see ``scripts``."""

HEADER_LUA: Final = "<BBHi8i8HHHH"
"""Version, source, events, first time, last time, bytes of the times, items, weights and sources."""

_HEADER = struct.Struct("<BBHqqHHHH")
HEADER_BYTES: Final = _HEADER.size
ID_BYTES: Final = 6

_HALVES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events of B strings of blocks, one after the other: T in all.

    Args:
        item_keys: int64 [T].
        weights: float32 [T].
        timestamps_s: int64 [T], non-decreasing within each string.
        sources: uint8 [T].
        offsets: int64 [B + 1]; string ``b`` gave events ``offsets[b]`` to ``offsets[b + 1] - 1``.
    """

    item_keys: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    timestamps_s: npt.NDArray[np.int64]
    sources: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def decode_blocks(strings: Sequence[bytes]) -> EventColumns:
    """Decode B strings, each of any number of blocks, oldest first.

    Raises:
        DamagedLogError: what the store holds is no block of this format.
    """
    counts: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    times: list[bytes] = []
    items: list[bytes] = []
    weights: list[bytes] = []
    sources: list[bytes] = []
    num_events = [0]
    for string in strings:
        at, num_of_string = 0, 0
        while at < len(string):
            count, first_s, last_s, ends = _parse_header(string, at)
            times.append(string[ends[0] : ends[1]])
            items.append(string[ends[1] : ends[2]])
            weights.append(string[ends[2] : ends[3]])
            sources.append(string[ends[3] : ends[4]] or bytes((string[at + 1],)) * count)
            counts.append(count)
            firsts.append(first_s)
            lasts.append(last_s)
            num_of_string += count
            at = ends[4]
        num_events.append(num_of_string)
    offsets = np.cumsum(num_events, dtype=np.int64)
    total = int(offsets[-1])
    return EventColumns(
        item_keys=_varints(items, total).view(np.int64),
        weights=_weights(_varints(weights, total)),
        timestamps_s=_times(_varints(times, total - len(counts)), counts, firsts, lasts),
        sources=np.frombuffer(b"".join(sources), np.uint8).copy(),
        offsets=offsets,
    )


def encode_blocks(records: npt.NDArray[np.void], size: int) -> list[bytes]:
    """Encode the events of one user, ordered by time, as blocks of ``size`` events.

    Args:
        records: ``records.RECORD`` [n].
        size: Events of a full block.
    """
    num_events = len(records)
    keys = np.ascontiguousarray(records["event"]).view(np.uint8).reshape(num_events, 8)
    ids = keys[:, :ID_BYTES].copy()
    ids[:, :2] ^= keys[:, ID_BYTES:]
    times = records["timestamp_s"]
    starts = np.arange(0, num_events, size)
    gaps, gap_ends = _encoded_varints(np.diff(times, prepend=times[:1]).view(np.uint64))
    items, item_ends = _encoded_varints(np.ascontiguousarray(records["item"]).view(np.uint64))
    weights, weight_ends = _encoded_varints(_weight_codes(np.ascontiguousarray(records["weight"])))
    sources = np.ascontiguousarray(records["source"])
    blocks = []
    for start in starts.tolist():
        stop = min(start + size, num_events)
        of_block = sources[start:stop]
        columns = (
            gaps[gap_ends[start + 1] : gap_ends[stop]],  # the first time of a block is in its header
            items[item_ends[start] : item_ends[stop]],
            weights[weight_ends[start] : weight_ends[stop]],
            of_block.tobytes() if (of_block != of_block[0]).any() else b"",
        )
        fields = (FORMAT_VERSION, int(of_block[0]), stop - start, int(times[start]), int(times[stop - 1]))
        header = _HEADER.pack(*fields, *(len(column) for column in columns))
        blocks.append(b"".join((header, ids[start:stop].tobytes(), *columns)))
    return blocks


def _encoded_varints(values: npt.NDArray[np.uint64]) -> tuple[bytes, list[int]]:
    """Return the varints of n values, and where each begins: n + 1 places."""
    digits = np.ones(len(values), np.int64)
    rest = values >> np.uint64(7)
    while rest.any():
        digits += rest > 0
        rest >>= np.uint64(7)
    ends = np.concatenate([[0], np.cumsum(digits)])
    out = np.empty(int(ends[-1]), np.uint8)
    for place in range(int(digits.max(initial=0))):
        here = np.flatnonzero(digits > place)
        digit = (values[here] >> np.uint64(7 * place)) & np.uint64(127)
        out[ends[here] + place] = digit.astype(np.uint8) | np.where(digits[here] > place + 1, 128, 0).astype(np.uint8)
    return out.tobytes(), ends.tolist()


def _weight_codes(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    halves = weights.astype(np.float64) * 2
    codes = weights.view(np.uint32).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    short = np.flatnonzero((halves >= 0) & (halves == np.floor(halves)) & (halves < _HALVES_MAX))
    codes[short] = halves[short].astype(np.uint64) * np.uint64(2)
    return codes


def _parse_header(string: bytes, at: int) -> tuple[int, int, int, tuple[int, int, int, int, int]]:
    """Return events, first and last time, and where ids, times, items, weights and sources end."""
    if len(string) < at + HEADER_BYTES:
        raise _damaged(f"a block of {len(string) - at} bytes")
    version, _, count, first_s, last_s, *sizes = _HEADER.unpack_from(string, at)
    if version != FORMAT_VERSION:
        raise DamagedLogError(
            f"user log has format {version}, this release reads {FORMAT_VERSION}", limit=FORMAT_VERSION, value=version
        )
    ids = at + HEADER_BYTES + ID_BYTES * count
    times = ids + sizes[0]
    items = times + sizes[1]
    weights = items + sizes[2]
    sources = weights + sizes[3]
    if count == 0 or sources > len(string) or sizes[3] not in (0, count):
        raise _damaged(f"a block of {count} events in {len(string) - at} bytes")
    return count, first_s, last_s, (ids, times, items, weights, sources)


def _varints(parts: list[bytes], count: int) -> npt.NDArray[np.uint64]:
    """Decode ``count`` varints that lie in several pieces."""
    raw = np.frombuffer(b"".join(parts), np.uint8)
    ends = np.flatnonzero(raw < 128)
    if len(ends) != count or (count and int(ends[-1]) != len(raw) - 1) or (not count and len(raw)):
        raise _damaged(f"{len(ends)} numbers in a column of {count}")
    if len(ends) == len(raw):  # all of one byte
        return raw.astype(np.uint64)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    digits = ends - starts + 1
    longest = int(digits.max())
    if longest > 10:
        raise _damaged(f"a number of {longest} bytes")
    low = (raw & 127).astype(np.uint64)
    values = low[starts]
    for place in range(1, longest):
        further = np.flatnonzero(digits > place)
        values[further] |= low[starts[further] + place] << np.uint64(7 * place)
    return values


def _weights(codes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    weights = (codes >> np.uint64(1)).astype(np.float32) * np.float32(0.5)
    odd = np.flatnonzero(codes & np.uint64(1))
    if len(odd):
        weights[odd] = (codes[odd] >> np.uint64(1)).astype(np.uint32).view(np.float32)
    return weights


def _times(
    gaps: npt.NDArray[np.uint64], counts: list[int], firsts: list[int], lasts: list[int]
) -> npt.NDArray[np.int64]:
    if not counts:
        return np.zeros(0, np.int64)
    num = np.array(counts, np.int64)
    starts = np.cumsum(num) - num
    steps = np.empty(int(num.sum()), np.int64)
    inside = np.ones(len(steps), np.bool_)
    inside[starts] = False
    steps[inside] = gaps.view(np.int64)
    first, last = np.array(firsts, np.int64), np.array(lasts, np.int64)
    steps[starts] = first
    steps[starts[1:]] -= last[:-1]
    times = np.cumsum(steps)
    if not np.array_equal(times[starts + num - 1], last):
        raise _damaged("times that do not end where their block does")
    return times


def _damaged(what: str) -> DamagedLogError:
    return DamagedLogError(f"user log is damaged: {what}")
