"""How new events travel to the store: 29 bytes each, little-endian. The store keeps them in ``blocks``."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from shared.errors import InvalidRequestError
from shared.hashing import id_key, id_keys
from shared.schema.api import Event
from shared.userlog.api import UserLoad

RECORD: Final = np.dtype(
    [("event", "<i8"), ("timestamp_s", "<i8"), ("item", "<i8"), ("weight", "<f4"), ("source", "u1")]
)
"""One event: key of its id, time, key of its item, weight, number of its source. The Lua scripts know these offsets."""

RECORD_BYTES: Final = RECORD.itemsize

Packed: TypeAlias = tuple[bytes, int, int]
"""Records ordered by (timestamp, arrival), duplicates in the batch, events beyond the newest ``keep``."""

Sources: TypeAlias = Mapping[str | None, int]
"""Number of each source that a log knows; that of None is for events that name no source."""

_PACK = struct.Struct("<qqqfB").pack


def pack_events(events: Sequence[Event], keep: int, sources: Sources) -> Packed:
    """Pack the events of one user; of two with the same id the first stays.

    Plain Python: most appends bring one to ten events a user, for which numpy's fixed costs are larger.

    Args:
        events: Events in order of arrival.
        keep: Newest events that a log can hold; older ones of a larger batch are not sent.
        sources: Number of each source.

    Raises:
        InvalidRequestError: a source has no number.
    """
    first: dict[int, Event] = {}
    for event in events:
        first.setdefault(id_key(event.event_id), event)
    records = [
        _PACK(key, event.timestamp_s, id_key(event.item_id), event.weight, source_number(event.source, sources))
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
    lengths = [len(load.item_keys), len(load.weights), len(load.timestamps_s), len(load.event_ids)]
    lengths += [] if load.sources is None else [len(load.sources)]
    if any(length != num_events for length in lengths):
        raise ValueError(f"columns of a history must have one length, have {lengths}")
    records = np.empty(num_events, RECORD)
    event_ids = load.event_ids
    records["event"] = event_ids if isinstance(event_ids, np.ndarray) else id_keys(event_ids)
    records["timestamp_s"] = load.timestamps_s
    records["item"] = load.item_keys
    records["weight"] = load.weights
    records["source"] = 0 if load.sources is None else load.sources
    _, first = np.unique(records["event"], return_index=True)
    if len(first) < num_events:
        first.sort()
        records = records[first]
    num_distinct = len(records)
    records = records[np.argsort(records["timestamp_s"], kind="stable")][-keep:]
    return records.tobytes(), num_events - num_distinct, num_distinct - len(records)


def numbered(names: Sequence[str]) -> Sources:
    """Number sources by their place; an event without a source is of the first."""
    return {None: 0, **{name: number for number, name in enumerate(names)}}


def check_sources(events: Sequence[Event], sources: Sources) -> None:
    """Refuse events of sources that the log does not have.

    Raises:
        InvalidRequestError: names the first such event by its position.
    """
    for position, event in enumerate(events):
        source_number(event.source, sources, f"events.{position}.source")


def source_number(name: str | None, sources: Sources, field: str = "source") -> int:
    """Return the number of a source; ``field`` is what an error calls it.

    Raises:
        InvalidRequestError: the log has no source of that name.
    """
    try:
        return sources[name]
    except KeyError:
        known = ", ".join(other for other in sources if other is not None)
        raise InvalidRequestError(
            f"{field} must be one of {known}, is {name}", field=field, limit=known, value=name
        ) from None
