"""Held-out requests and the histories to load before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from training.data import (
    Dataset,
    EventLog,
    SyntheticConfig,
    held_out_request,
    held_out_requests,
    history_events,
    load_synthetic,
)
from training.data.dataset import Catalog, UserTable
from training.data.replay import users_in_test_period
from training.data.split import Split

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]

# Test period from second 50: user 0 has a past, user 1 is new, user 2 only has a past, user 3 has nothing.
EVENTS: list[Event] = [
    (0, 1, 4, 10), (0, 2, 3, 20), (0, 3, 5, 49), (0, 5, 4, 60), (0, 4, 2, 60), (0, 5, 1, 70), (0, 2, 5, 80),
    (1, 9, 3, 50), (2, 7, 4, 30),
]  # fmt: skip


@pytest.fixture
def dataset(make_log: MakeLog) -> Dataset:
    """Return four users and ten items, the test period beginning at second 50."""
    log = make_log(EVENTS, 4)
    in_order = log.rows(log.time_order)
    first = int(np.searchsorted(in_order.timestamp_s, 50))
    split = Split(
        in_order.select(slice(0, first)), in_order.select(slice(first, first)), in_order.select(slice(first, 99))
    )
    catalog = Catalog(
        item_id=np.arange(1, 11),
        title=tuple(f"item {item}" for item in range(1, 11)),
        year=np.zeros(10, np.int16),
        genre_names=("", "one"),
        genre_values=np.ones(10, np.int16),
        genre_offsets=np.arange(11),
        group_id=np.ones(10, np.int64),
    )
    users = UserTable(
        user_id=np.array([11, 12, 13, 14]),
        gender=np.array([1, 2, 0, 0], np.uint8),
        age=np.zeros(4, np.int16),
        occupation=np.zeros(4, np.int16),
        occupation_names=("other",),
        zip_code=("",) * 4,
    )
    return Dataset("hand-made", "made by hand", ("web",), catalog, users, log, split)


def test_users_of_the_test_period(dataset: Dataset) -> None:
    assert users_in_test_period(dataset).tolist() == [0, 1]


def test_a_request_hides_the_next_items_among_untouched_ones(dataset: Dataset) -> None:
    request = held_out_request(dataset, 0, num_next=3, num_sampled=4, seed=1)
    assert request is not None
    assert (request.user_id, request.timestamp_s, request.surface, request.num_earlier) == (11, 60, "web", 3)
    assert len(set(request.candidates.tolist())) == 7
    ratings = dict(
        zip(request.candidates[request.is_next].tolist(), request.ratings[request.is_next].tolist(), strict=True)
    )
    assert ratings == {4: 2, 5: 4, 2: 5}  # item 5 at its first rating; item 2 again, after the split
    assert set(request.candidates[~request.is_next].tolist()) <= {6, 7, 8, 9, 10}
    assert not request.ratings[~request.is_next].any()


def test_only_the_first_next_items_are_taken(dataset: Dataset) -> None:
    request = held_out_request(dataset, 0, num_next=2, num_sampled=0, seed=1)
    assert request is not None
    assert sorted(request.candidates.tolist()) == [4, 5]


def test_a_new_user_has_a_request_without_a_past(dataset: Dataset) -> None:
    request = held_out_request(dataset, 1, num_next=1, num_sampled=9, seed=0)
    assert request is not None
    assert (request.timestamp_s, request.num_earlier) == (50, 0)
    assert sorted(request.candidates.tolist()) == list(range(1, 11))


@pytest.mark.parametrize(
    ("user_index", "num_next", "num_sampled"), [(0, 4, 1), (0, 3, 6), (1, 2, 1), (2, 1, 1), (3, 1, 1)]
)
def test_users_who_cannot_have_the_request_get_none(
    dataset: Dataset, user_index: int, num_next: int, num_sampled: int
) -> None:
    assert held_out_request(dataset, user_index, num_next, num_sampled, seed=0) is None


@pytest.mark.parametrize(("num_next", "num_sampled"), [(0, 5), (1, -1)])
def test_impossible_sizes_are_refused(dataset: Dataset, num_next: int, num_sampled: int) -> None:
    with pytest.raises(ValueError, match=f"are {num_next} and {num_sampled}"):
        held_out_request(dataset, 0, num_next, num_sampled, seed=0)


def test_requests_are_seeded() -> None:
    dataset = load_synthetic(SyntheticConfig(num_events=4_000, num_users=80, num_ads=300, activity=0.1), seed=1)

    def draw(seed: int) -> list[tuple[int, list[int]]]:
        requests = held_out_requests(dataset, 3, 100, seed)
        return [(request.user_id, request.candidates.tolist()) for request in requests]

    first = draw(7)
    assert first == draw(7)
    assert first != draw(8)
    assert len(first) > 40
    assert sorted(user for user, _ in first) != [user for user, _ in first]
    assert {user for user, _ in first} == {user for user, _ in draw(8)}


def test_the_true_items_are_not_given_away_by_their_place() -> None:
    dataset = load_synthetic(SyntheticConfig(num_events=4_000, num_users=80, num_ads=300, activity=0.1), seed=1)
    places = [np.flatnonzero(request.is_next) for request in held_out_requests(dataset, 3, 27, seed=2)]
    assert abs(np.concatenate(places).mean() - 14.5) < 3.0


def test_histories_end_before_the_split_and_keep_the_newest(dataset: Dataset) -> None:
    loaded = dict(history_events(dataset, until_s=49, max_events=9))
    assert sorted(loaded) == [11, 13]
    assert loaded[11].item_id.tolist() == [1, 2]
    loaded = dict(history_events(dataset, dataset.split.test_start_s, max_events=2))
    events = loaded[11]
    assert events.item_id.tolist() == [2, 3]
    assert events.rating.tolist() == [3.0, 5.0]
    assert events.timestamp_s.tolist() == [20, 49]
    assert events.surface.tolist() == [0, 0]
    assert events.profile == {"gender": "F", "age": "0", "occupation": "other", "zip_code": ""}
    assert len(events) == 2


def test_event_ids_are_the_global_ranks(dataset: Dataset) -> None:
    loaded = dict(history_events(dataset, until_s=10**9, max_events=99))
    every = np.concatenate([events.event_id for events in loaded.values()])
    assert sorted(every.tolist()) == list(range(1, len(EVENTS) + 1))
    assert loaded[12].event_id.tolist() == [5]


def test_a_history_needs_an_event(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="at least 1, is 0"):
        next(history_events(dataset, 10, 0))
