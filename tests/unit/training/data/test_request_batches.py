"""Rows become requests: one history a request, every row in exactly one batch, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import EventColumns, EventLog, HistoryMode, HistoryReader, request_batches, request_starts

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]

# User 0 sees items 1, 2, 3 in second 20, user 1 items 1, 2 in the same second; all have a past.
EVENTS: list[Event] = [
    (0, 9, 3, 10), (1, 8, 4, 12), (0, 1, 5, 20), (0, 2, 3, 20), (0, 3, 4, 20), (1, 1, 1, 20), (1, 2, 2, 20),
    (0, 4, 3, 30),
]  # fmt: skip


def test_equal_user_and_second_form_one_request(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    rows = log.rows(log.time_order)
    assert request_starts(rows).tolist() == [0, 1, 2, 5, 7]
    (batch,) = request_batches(rows, HistoryReader(log, 4, "strict"), 100)
    assert batch.user_index.tolist() == [0, 1, 0, 1, 0]
    assert batch.timestamp_s.tolist() == [10, 12, 20, 20, 30]
    assert batch.request_index.tolist() == [0, 1, 2, 2, 2, 3, 3, 4]
    assert batch.history.num_total.tolist() == [0, 0, 1, 1, 4]
    assert batch.history.item_ids[2].tolist() == [9, 0, 0, 0]
    assert (batch.num_requests, batch.num_candidates) == (5, 8)


def test_in_pub_mode_every_row_is_its_own_request(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    batches = list(request_batches(log.rows(log.time_order), HistoryReader(log, 4, "pub"), 3))
    assert [batch.num_candidates for batch in batches] == [3, 3, 2]
    assert batches[1].request_index.tolist() == [0, 1, 2]
    assert batches[1].history.item_ids[0].tolist() == [9, 1, 0, 0]


def test_a_request_is_not_cut_at_the_batch_limit(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    rows = log.rows(log.time_order)
    reader = HistoryReader(log, 4, "strict")
    sizes = {limit: [batch.num_candidates for batch in request_batches(rows, reader, limit)] for limit in (3, 4, 5, 8)}
    assert sizes == {3: [2, 3, 3], 4: [2, 3, 3], 5: [5, 3], 8: [8]}


def test_a_request_over_the_limit_is_cut_and_reads_one_history(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    batches = list(request_batches(log.rows(log.time_order), HistoryReader(log, 4, "strict"), 2))
    assert [batch.num_candidates for batch in batches] == [2, 2, 1, 2, 1]
    assert batches[1].request_index.tolist() == [0, 0]
    assert batches[1].history.item_ids.tolist() == batches[2].history.item_ids.tolist() == [[9, 0, 0, 0]]


def test_two_surfaces_in_one_second_are_two_requests() -> None:
    columns = EventColumns(
        np.zeros(2, np.int32),
        np.array([1, 2]),
        np.array([3, 3], np.uint8),
        np.array([7, 7]),
        np.array([0, 1], np.uint8),
    )
    log = EventLog.build(columns, 1)
    (batch,) = request_batches(log.rows(log.time_order), HistoryReader(log, 2, "strict"), 10)
    assert batch.surface.tolist() == [0, 1]


def test_no_rows_no_batches(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    empty = log.rows(np.zeros(0, np.int64))
    assert request_starts(empty).tolist() == []
    assert list(request_batches(empty, HistoryReader(log, 2, "strict"), 4)) == []


def test_a_batch_needs_a_row(make_log: MakeLog) -> None:
    log = make_log(EVENTS, 2)
    with pytest.raises(ValueError, match="at least 1, is 0"):
        next(request_batches(log.rows(log.time_order), HistoryReader(log, 2, "pub"), 0))


@settings(max_examples=60)
@given(st.data())
def test_batches_hold_every_row_once_with_the_history_it_would_read_alone(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    log = make_log(data.draw(event_lists), 4)
    limit = data.draw(st.integers(1, 12))
    mode = data.draw(st.sampled_from(get_args(HistoryMode)))
    rows = log.rows(log.time_order)
    reader = HistoryReader(log, 4, mode)
    alone = reader.read(rows)
    done = 0
    for batch in request_batches(rows, reader, limit):
        assert 1 <= batch.num_candidates <= limit
        assert np.unique(batch.request_index).tolist() == list(range(batch.num_requests))
        assert (np.diff(batch.request_index) >= 0).all()
        part = slice(done, done + batch.num_candidates)
        assert batch.candidates.event_position.tolist() == rows.event_position[part].tolist()
        assert batch.user_index[batch.request_index].tolist() == rows.user_index[part].tolist()
        assert batch.timestamp_s[batch.request_index].tolist() == rows.timestamp_s[part].tolist()
        assert batch.history.item_ids[batch.request_index].tolist() == alone.item_ids[part].tolist()
        assert batch.history.num_total[batch.request_index].tolist() == alone.num_total[part].tolist()
        done += batch.num_candidates
    assert done == len(rows)
