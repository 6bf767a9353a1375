"""How an event is packed: 28 bytes, little-endian, so that a history is one string and one ``np.frombuffer``.

A sorted set would cost over 100 bytes an event and one reply element an event to parse: reading 1,000 events took
Python longer than the round trip. Packed, 1,000 events are one 28 KB reply.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.hashing import id_key, id_keys
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog.api import UserLoad

RECORD: Final = np.dtype([("event", "<i8"), ("timestamp_s", "<i8"), ("item", "<i8"), ("weight", "<f4")])
"""One event: key of its id, time, key of its item, weight. The Lua scripts know these offsets."""

RECORD_BYTES: Final = RECORD.itemsize

Packed: TypeAlias = tuple[bytes, int, int]
"""Records ordered by (timestamp, arrival), duplicates in the batch, events beyond the newest ``keep``."""

_PACK = struct.Struct("<qqqf").pack


def pack_events(events: Sequence[Event], keep: int) -> Packed:
    """Pack the events of one user; of two with the same id the first stays.

    Plain Python: most appends bring one to ten events a user, for which numpy's fixed costs are larger.

    Args:
        events: Events in order of arrival.
        keep: Newest events that a log can hold; older ones of a larger batch are not sent.
    """
    first: dict[int, Event] = {}
    for event in events:
        first.setdefault(id_key(event.event_id), event)
    records = [
        _PACK(key, event.timestamp_s, id_key(event.item_id), event.weight)
        for key, event in sorted(first.items(), key=lambda item: item[1].timestamp_s)  # sorted() is stable: arrival
    ]
    return b"".join(records[-keep:]), len(events) - len(first), max(len(first) - keep, 0)


def pack_load(load: UserLoad, keep: int) -> Packed:
    """Pack a whole history; of two events with the same id the first stays.

    Args:
        load: The history.
        keep: As in ``pack_events``.

    Raises:
        ValueError: the columns differ in length.
    """
    num_events = len(load)
    columns = (load.item_keys, load.weights, load.timestamps_s, load.event_ids)
    if any(len(column) != num_events for column in columns):
        raise ValueError(f"columns of a history must have one length, have {[len(column) for column in columns]}")
    records = np.empty(num_events, RECORD)
    event_ids = load.event_ids
    records["event"] = event_ids if isinstance(event_ids, np.ndarray) else id_keys(event_ids)
    records["timestamp_s"] = load.timestamps_s
    records["item"] = load.item_keys
    records["weight"] = load.weights
    _, first = np.unique(records["event"], return_index=True)
    if len(first) < num_events:
        first.sort()
        records = records[first]
    num_distinct = len(records)
    records = records[np.argsort(records["timestamp_s"], kind="stable")][-keep:]
    return records.tobytes(), num_events - num_distinct, num_distinct - len(records)


def unpack_history(packed: bytes, num_total: int, profile: dict[str, str]) -> UserHistory:
    """Unpack records to columns; they own their memory, so a small history does not hold a large reply."""
    records: npt.NDArray[np.void] = np.frombuffer(packed, RECORD)
    return UserHistory(
        item_keys=records["item"].copy(),
        weights=records["weight"].copy(),
        timestamps_s=records["timestamp_s"].copy(),
        num_total=num_total,
        profile=profile,
    )
