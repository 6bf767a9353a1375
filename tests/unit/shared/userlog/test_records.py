"""The packed form of events."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequestError
from shared.schema.api import Event
from shared.userlog import UserLoad
from shared.userlog.records import RECORD, RECORD_BYTES, numbered, pack_events, pack_load

MakeEvent = Callable[..., Event]

SOURCES = numbered(["feed", "search"])

PAIRS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=20)


def test_the_layout_is_fixed(event: MakeEvent) -> None:
    """The scripts in the store know the offsets."""
    packed, duplicates, cut = pack_events([event("7", 1_000, item=9, weight=4.5, source="search")], 10, SOURCES)
    assert packed == struct.pack("<qqqfB", 7, 1_000, 9, 4.5, 1)
    assert len(packed) == RECORD_BYTES == 29
    assert (duplicates, cut) == (0, 0)


def test_records_are_ordered_by_time_then_arrival(event: MakeEvent) -> None:
    packed, _, _ = pack_events([event("a", 5, item=1), event("b", 3, item=2), event("c", 5, item=3)], 10, SOURCES)
    assert np.frombuffer(packed, RECORD)["item"].tolist() == [2, 1, 3]


def test_a_source_that_the_log_does_not_have_is_refused(event: MakeEvent) -> None:
    with pytest.raises(InvalidRequestError, match="source must be one of feed, search, is mail") as caught:
        pack_events([event("a", 5, source="mail")], 10, SOURCES)
    assert caught.value.context["field"] == "source"


@given(pairs=PAIRS, keep=st.integers(1, 25))
def test_both_ways_of_packing_agree(pairs: list[tuple[int, int]], keep: int) -> None:
    events = [
        Event(
            event_id=f"e{number}",
            user_id=1,
            item_id=position,
            weight=position / 2,
            timestamp_s=time,
            source=("feed", "search", None)[position % 3],
        )
        for position, (number, time) in enumerate(pairs)
    ]
    load = UserLoad(
        user=1,
        item_keys=np.arange(len(pairs)),
        weights=(np.arange(len(pairs)) / 2).astype(np.float32),
        timestamps_s=np.array([time for _, time in pairs], np.int64),
        event_ids=[f"e{number}" for number, _ in pairs],
        sources=np.array([(0, 1, 0)[position % 3] for position in range(len(pairs))], np.uint8),
    )
    assert pack_load(load, keep) == pack_events(events, keep, SOURCES)


def test_integer_ids_need_no_strings() -> None:
    ids = np.array([3, 1, 2], np.int64)
    columns = (np.arange(3), np.ones(3, np.float32), np.arange(3))
    assert pack_load(UserLoad(1, *columns, ids), 10) == pack_load(UserLoad(1, *columns, ["3", 1, "2"]), 10)


def test_columns_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1, 2, 2\]"):
        pack_load(UserLoad(1, np.zeros(2, np.int64), np.zeros(1, np.float32), np.zeros(2, np.int64), [1, 2]), 10)
