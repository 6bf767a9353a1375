"""The log's order, its rows, and the vectorised search for what lies before a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DataUnavailableError
from training.data import EventColumns, EventLog

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]

EVENTS: list[Event] = [(2, 7, 5, 30), (0, 9, 4, 20), (0, 3, 3, 20), (0, 5, 1, 10), (2, 1, 4, 5), (0, 4, 5, 40)]


def test_events_lie_by_user_then_time_then_item(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 4)
    assert log.user_offsets.tolist() == [0, 4, 4, 6, 6]
    assert log.user_index.tolist() == [0, 0, 0, 0, 2, 2]
    assert log.item_id.tolist() == [5, 3, 9, 4, 1, 7]
    assert log.rating.tolist() == [1, 3, 4, 5, 4, 5]
    assert log.timestamp_s.tolist() == [10, 20, 20, 40, 5, 30]
    assert log.surface.tolist() == log.slot.tolist() == [0] * 6


def test_time_order_and_event_ids_rank_events_globally(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 4)
    assert log.timestamp_s[log.time_order].tolist() == [5, 10, 20, 20, 30, 40]
    assert log.item_id[log.time_order].tolist() == [1, 5, 3, 9, 7, 4]
    assert log.event_id.tolist() == [2, 3, 4, 6, 1, 5]


def test_second_start_is_where_the_same_second_of_the_same_user_begins(make_log: MakeLog) -> None:
    assert make_log(EVENTS, 4).second_start.tolist() == [0, 1, 1, 3, 4, 5]


def test_neighbouring_users_with_equal_seconds_stay_apart(make_log: MakeLog) -> None:
    assert make_log([(0, 1, 3, 10), (1, 2, 3, 10)], 2).second_start.tolist() == [0, 1]


def test_rows_carry_labels_and_point_at_their_event(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 4)
    rows = log.rows(np.array([3, 1, 2]))
    assert rows.item_id.tolist() == [4, 3, 9]
    assert rows.click.tolist() == [True, False, True]
    assert rows.conversion.tolist() == [True, False, False]
    assert rows.event_position.tolist() == [3, 1, 2]
    assert log.num_earlier(rows.event_position).tolist() == [3, 1, 2]


def test_surface_and_slot_are_sorted_with_their_events() -> None:
    columns = EventColumns(
        np.array([0, 0], np.int32),
        np.array([8, 6]),
        np.array([3, 4], np.uint8),
        np.array([9, 2]),
        surface=np.array([1, 0], np.uint8),
        slot=np.array([3, 2], np.uint8),
    )
    log = EventLog.build(columns, 1)
    assert log.surface.tolist() == [0, 1]
    assert log.slot.tolist() == [2, 3]


def test_batches_cover_all_rows_in_order_and_slices_are_views(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 4)
    rows = log.rows(log.time_order)
    batches = list(rows.batches(4))
    assert [len(batch) for batch in batches] == [4, 2]
    assert np.concatenate([batch.item_id for batch in batches]).tolist() == rows.item_id.tolist()
    assert np.shares_memory(batches[1].timestamp_s, rows.timestamp_s)


def test_a_batch_needs_a_row(make_log: MakeLog) -> None:
    rows = make_log(EVENTS, 4).rows(np.arange(2))
    with pytest.raises(ValueError, match="at least 1, is 0"):
        list(rows.batches(0))


@pytest.mark.parametrize(
    ("event", "field"),
    [((4, 1, 3, 1), "user_index"), ((-1, 1, 3, 1), "user_index"), ((0, 0, 3, 1), "item_id"), ((0, 1, 0, 1), "rating"),
     ((0, 1, 6, 1), "rating")],
)  # fmt: skip
def test_events_out_of_range_are_refused_by_field(make_log: MakeLog, event: Event, field: str) -> None:
    with pytest.raises(DataUnavailableError, match=field) as caught:
        make_log([*EVENTS, event], 4)
    assert caught.value.context["field"] == field


def test_an_empty_log_has_users_but_no_events(make_log: MakeLog) -> None:
    log = make_log([], 3)
    assert len(log) == 0
    assert log.num_users == 3
    assert log.position_before(np.array([0, 2]), 10).tolist() == [0, 0]


@settings(max_examples=60)
@given(st.data())
def test_position_before_counts_strictly_earlier_events(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    events = data.draw(event_lists)
    queries = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(99, 108)), max_size=8))
    log = make_log(events, 4)
    users = np.array([user for user, _ in queries], np.int64)
    times = np.array([time for _, time in queries], np.int64)
    expected = [sum(1 for owner, _, _, at in events if owner == user and at < time) for user, time in queries]
    assert (log.position_before(users, times) - log.user_offsets[users]).tolist() == expected


@settings(max_examples=60)
@given(st.data())
def test_input_order_does_not_matter(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    events = sorted({event[:2] + event[3:]: event for event in data.draw(event_lists)}.values())
    shuffled = data.draw(st.permutations(events))
    first, second = make_log(events, 4), make_log(shuffled, 4)
    for field in ("user_index", "item_id", "rating", "timestamp_s", "time_order", "event_id", "second_start"):
        assert getattr(first, field).tolist() == getattr(second, field).tolist()
