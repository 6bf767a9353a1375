"""What a row reads of the past: equal to a plain Python reference, and never anything of the present or the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import Align, EventLog, HistoryBatch, HistoryMode, HistoryReader

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]

EVENTS: list[Event] = [(0, 5, 1, 10), (0, 3, 3, 20), (0, 9, 4, 20), (0, 4, 5, 40), (2, 1, 4, 5), (2, 7, 5, 30)]


def _events_of(batch: HistoryBatch, row: int) -> list[tuple[int, float, int]]:
    mask = batch.mask[row]
    columns = (batch.item_ids[row][mask], batch.ratings[row][mask], batch.timestamps_s[row][mask])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_pub_reads_the_same_second_and_strict_does_not(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 3)
    rows = log.rows(np.array([2, 3]))
    pub = HistoryReader(log, 3, "pub").read(rows)
    strict = HistoryReader(log, 3, "strict").read(rows)
    assert _events_of(pub, 0) == [(5, 1.0, 10), (3, 3.0, 20)]
    assert _events_of(strict, 0) == [(5, 1.0, 10)]
    assert _events_of(pub, 1) == _events_of(strict, 1) == [(5, 1.0, 10), (3, 3.0, 20), (9, 4.0, 20)]


def test_padding_is_zero_on_the_chosen_side(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 3)
    rows = log.rows(np.array([4, 2]))
    left = HistoryReader(log, 4, "pub", "left").read(rows)
    right = HistoryReader(log, 4, "pub", "right").read(rows)
    assert left.item_ids.tolist() == [[0, 0, 0, 0], [5, 3, 0, 0]]
    assert right.item_ids.tolist() == [[0, 0, 0, 0], [0, 0, 5, 3]]
    assert left.mask.tolist() == [[False] * 4, [True, True, False, False]]
    assert right.timestamps_s.tolist() == [[0, 0, 0, 0], [0, 0, 10, 20]]
    assert left.ratings.dtype == np.float32
    assert left.lengths.tolist() == right.num_total.tolist() == [0, 2]


def test_only_the_newest_events_fit_but_all_are_counted(make_log: MakeLog) -> None:
    log = make_log([(0, item, 3, item) for item in range(1, 8)], 1)
    batch = HistoryReader(log, 2, "strict").read(log.rows(np.array([6])))
    assert batch.item_ids.tolist() == [[5, 6]]
    assert (batch.lengths.tolist(), batch.num_total.tolist()) == ([2], [6])


def test_read_at_serves_times_that_no_row_has(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 3)
    batch = HistoryReader(log, 3, "pub").read_at(np.array([0, 0, 1, 2]), np.array([20, 21, 99, 6]))
    assert [_events_of(batch, row) for row in range(4)] == [
        [(5, 1.0, 10)],
        [(5, 1.0, 10), (3, 3.0, 20), (9, 4.0, 20)],
        [],
        [(1, 4.0, 5)],
    ]


@pytest.mark.parametrize("length", [0, -1])
def test_a_history_needs_a_length(make_log: MakeLog, length: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, is {length}"):
        HistoryReader(make_log(EVENTS, 3), length, "pub")


def test_an_empty_log_gives_empty_histories(make_log: MakeLog) -> None:
    batch = HistoryReader(make_log([], 2), 3, "strict").read_at(np.array([0, 1]), 5)
    assert not batch.mask.any()
    assert batch.item_ids.tolist() == [[0, 0, 0], [0, 0, 0]]


@settings(max_examples=60)
@given(st.data())
def test_reader_equals_a_python_loop(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    events = data.draw(event_lists)
    length = data.draw(st.integers(1, 6))
    mode = data.draw(st.sampled_from(get_args(HistoryMode)))
    align = data.draw(st.sampled_from(get_args(Align)))
    log = make_log(events, 4)
    rows = log.rows(log.time_order)
    batch = HistoryReader(log, length, mode, align).read(rows)
    in_order = list(zip(log.user_index, log.item_id, log.rating, log.timestamp_s, strict=True))
    for row, position in enumerate(rows.event_position.tolist()):
        user, _, _, now = in_order[position]
        earlier = [
            (int(item), float(rating), int(time))
            for owner, item, rating, time in in_order[:position]
            if owner == user and (mode == "pub" or time < now)
        ]
        assert _events_of(batch, row) == earlier[-length:]
        assert batch.num_total[row] == len(earlier)
        there = np.flatnonzero(batch.mask[row]).tolist()
        first = 0 if align == "left" else length - len(there)
        assert there == list(range(first, first + len(there)))
    for column in (batch.item_ids, batch.ratings, batch.timestamps_s, batch.surfaces):
        assert not column[~batch.mask].any()


@settings(max_examples=60)
@given(st.data())
def test_nothing_at_or_after_the_request_time_is_ever_read(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    """Leak test: whatever becomes of the events from second t on, what is read at t stays the same."""
    events = data.draw(event_lists)
    now = data.draw(st.integers(100, 107))
    past = [event for event in events if event[3] < now]
    other_future = data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 5), st.integers(now, 109)), max_size=20)
    )
    users = np.arange(4)
    before, after = make_log(events, 4), make_log(past + other_future, 4)
    for mode in get_args(HistoryMode):
        seen = HistoryReader(before, 5, mode).read_at(users, now)
        again = HistoryReader(after, 5, mode).read_at(users, now)
        assert [_events_of(seen, user) for user in range(4)] == [_events_of(again, user) for user in range(4)]
    old_rows = before.rows(before.time_order[before.timestamp_s[before.time_order] < now])
    new_rows = after.rows(after.time_order[after.timestamp_s[after.time_order] < now])
    for mode in get_args(HistoryMode):
        seen = HistoryReader(before, 5, mode).read(old_rows)
        again = HistoryReader(after, 5, mode).read(new_rows)
        for field in ("item_ids", "ratings", "timestamps_s", "mask", "num_total"):
            assert getattr(seen, field).tolist() == getattr(again, field).tolist()


@settings(max_examples=60)
@given(st.data())
def test_strict_rows_do_not_see_their_own_second(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    """Leak test: rating or item of any event in the row's own second may change, the row's strict history may not."""
    events = data.draw(event_lists)
    now = data.draw(st.integers(100, 106))
    rating = data.draw(st.integers(1, 5))
    changed = [
        (user, 7 - item, rating, time) if time == now else (user, item, r, time) for user, item, r, time in events
    ]
    batches = []
    for log in (make_log(events, 4), make_log(changed, 4)):
        positions = np.flatnonzero(log.timestamp_s == now)
        batches.append(HistoryReader(log, 5, "strict").read(log.rows(positions)))
    assert batches[0].item_ids.tolist() == batches[1].item_ids.tolist()
    assert batches[0].ratings.tolist() == batches[1].ratings.tolist()
    assert not (batches[0].timestamps_s >= now).any()
