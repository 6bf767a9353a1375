"""The T1 split: on hand-made logs, and its published counts on the real data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.settings import load_settings
from training.data import Dataset, EventLog, HistoryReader, load_dataset, request_batches, split_by_time

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]


def test_rows_of_users_with_a_short_past_are_dropped(make_log: MakeLog) -> None:
    log = make_log([(0, item, 3, 10 * item) for item in range(1, 8)] + [(1, 1, 3, 5)], 2)
    split = split_by_time(log)
    assert [len(split.train), len(split.valid), len(split.test)] == [1, 0, 1]
    assert split.train.item_id.tolist() == [6]
    assert split.test.item_id.tolist() == [7]
    assert split.test_start_s == 70


def test_events_of_the_same_second_count_as_earlier(make_log: MakeLog) -> None:
    split = split_by_time(make_log([(0, item, 3, 10) for item in range(1, 7)], 1))
    assert split.test.item_id.tolist() == [6]


def test_parts_are_cut_at_80_and_10_percent_rounded_down(make_log: MakeLog) -> None:
    split = split_by_time(make_log([(0, item, 3, item) for item in range(1, 20)], 1), num_earlier_min=0)
    assert [len(split.train), len(split.valid), len(split.test)] == [15, 1, 3]


def test_a_split_without_test_rows_has_no_start(make_log: MakeLog) -> None:
    with pytest.raises(ValueError, match="no test row"):
        _ = split_by_time(make_log([(0, 1, 3, 1)], 1)).test_start_s


@settings(max_examples=60)
@given(st.data())
def test_parts_are_the_kept_rows_in_time_order(
    make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject
) -> None:
    events = data.draw(event_lists)
    earlier_min = data.draw(st.integers(0, 6))
    split = split_by_time(make_log(events, 4), earlier_min)
    in_order = sorted((at, user, item) for user, item, _, at in events)
    seen = [0] * 4
    kept = []
    for at, user, item in in_order:
        if seen[user] >= earlier_min:
            kept.append((at, user, item))
        seen[user] += 1
    parts = (split.train, split.valid, split.test)
    rows = [
        row
        for part in parts
        for row in zip(part.timestamp_s.tolist(), part.user_index.tolist(), part.item_id.tolist(), strict=True)
    ]
    assert rows == kept


@pytest.fixture(scope="module")
def ml_1m() -> Dataset:
    """Return MovieLens-1M; the first time it is fetched."""
    return load_dataset("ml-1m", load_settings().data_dir)


def _log_loss(labels: np.ndarray, probability: float) -> float:
    base = labels.mean()
    return float(-(base * np.log(probability) + (1 - base) * np.log1p(-probability)))


def test_t1_has_the_published_counts(ml_1m: Dataset) -> None:
    split = ml_1m.split
    assert len(ml_1m.log) == 1_000_209
    assert (len(ml_1m.users), len(ml_1m.catalog), len(np.unique(ml_1m.log.item_id))) == (6_040, 3_883, 3_706)
    assert len(split.train) + len(split.valid) + len(split.test) == 970_009
    assert (len(split.train), len(split.valid), len(split.test)) == (776_007, 97_000, 97_002)


def test_t1_gives_the_known_figures_of_constant_predictions(ml_1m: Dataset) -> None:
    train, test = ml_1m.split.train, ml_1m.split.test
    assert _log_loss(test.click, float(train.click.mean())) == pytest.approx(0.6920, abs=5e-5)
    assert _log_loss(test.conversion, float(train.conversion.mean())) == pytest.approx(0.4820, abs=5e-5)


def test_half_of_the_t1_rows_have_an_event_of_the_same_second_in_their_published_history(ml_1m: Dataset) -> None:
    parts = (ml_1m.split.train, ml_1m.split.valid, ml_1m.split.test)
    positions = np.concatenate([part.event_position for part in parts])
    assert (ml_1m.log.second_start[positions] < positions).mean() == pytest.approx(0.53, abs=0.005)


@pytest.mark.parametrize("mode", ["pub", "strict"])
def test_a_pass_over_the_train_rows_takes_seconds(ml_1m: Dataset, mode: str) -> None:
    reader = HistoryReader(ml_1m.log, 50, "pub" if mode == "pub" else "strict")
    begin = time.process_time()
    num_rows = sum(batch.num_candidates for batch in request_batches(ml_1m.split.train, reader, 2_048))
    assert num_rows == 776_007
    assert time.process_time() - begin < 8.0


def test_the_second_surface_shares_its_titles() -> None:
    dataset = load_dataset("ml-100k", load_settings().data_dir)
    assert (len(dataset.log), len(dataset.users), len(dataset.catalog)) == (100_000, 943, 1_664)
    assert int((dataset.catalog.item_id < 10_000).sum()) == 1_603
