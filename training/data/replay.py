"""Makes held-out real requests, and the histories that a server must hold before it answers them.

A held-out request is one user of the test period at their first test second: the items they chose next, hidden among
others that they never touched. The server is loaded with events strictly before the test period, so whatever it
finds it must have predicted.

Shape letters: C candidates of a request, E events of one user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class HeldOutRequest:
    """One request with a known answer.

    Args:
        user_id: Who asks.
        user_index: Their position in the user table.
        timestamp_s: When, seconds since the epoch: the first second of the test period in which they did something.
        surface: Name of the surface.
        candidates: int64 [C], distinct item ids in random order.
        is_next: bool [C], true for the items that the user chose next.
        ratings: uint8 [C], the rating given to those, 0 elsewhere.
        num_earlier: Events of the user strictly before ``timestamp_s``.
    """

    user_id: int
    user_index: int
    timestamp_s: int
    surface: str
    candidates: npt.NDArray[np.int64]
    is_next: npt.NDArray[np.bool_]
    ratings: npt.NDArray[np.uint8]
    num_earlier: int


@dataclass(frozen=True, slots=True)
class UserEvents:
    """Plain events of one user, oldest first, as a store takes them.

    Args:
        event_id: int64 [E], unique in the data set and the same in every process.
        item_id: int64 [E].
        rating: float32 [E], 1 to 5.
        timestamp_s: int64 [E], non-decreasing.
        surface: uint8 [E], position in ``Dataset.surfaces``.
        profile: Request-only attributes of the user.
    """

    event_id: npt.NDArray[np.int64]
    item_id: npt.NDArray[np.int64]
    rating: npt.NDArray[np.float32]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    profile: dict[str, str]

    def __len__(self) -> int:
        """Number of events E."""
        return len(self.item_id)


def users_in_test_period(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Return the user indices with an event in the test period, those without any earlier event included: ascending."""
    later = dataset.log.timestamp_s >= dataset.split.test_start_s
    return np.unique(dataset.log.user_index[later]).astype(np.int64)


def held_out_request(
    dataset: Dataset, user_index: int, num_next: int, num_sampled: int, seed: int
) -> HeldOutRequest | None:
    """Make the request of one user.

    The sampled others are items that the user never touches, before or after: a later favourite would be a wrong
    negative.

    Args:
        dataset: Data with a split.
        user_index: The user.
        num_next: Items chosen next, distinct, at least 1.
        num_sampled: Others, at least 0; C is the sum.
        seed: Same dataset, user, sizes and seed: same request.

    Returns:
        The request; None when the user has fewer than ``num_next`` distinct items from the test period on, or when
        fewer than ``num_sampled`` items of the catalog are left untouched.

    Raises:
        ValueError: a number is out of range.
    """
    if num_next < 1 or num_sampled < 0:
        raise ValueError(f"num_next must be at least 1 and num_sampled at least 0, are {num_next} and {num_sampled}")
    log = dataset.log
    begin, end = int(log.user_offsets[user_index]), int(log.user_offsets[user_index + 1])
    first = begin + int(np.searchsorted(log.timestamp_s[begin:end], dataset.split.test_start_s))
    _, firsts = np.unique(log.item_id[first:end], return_index=True)
    chosen = first + np.sort(firsts)[:num_next]  # a repeated item counts once, at its first time
    others = np.setdiff1d(dataset.catalog.item_id, log.item_id[begin:end])
    if len(chosen) < num_next or len(others) < num_sampled:
        return None
    random = np.random.default_rng((seed, user_index))
    candidates = np.concatenate([log.item_id[chosen], random.choice(others, num_sampled, replace=False)])
    ratings = np.concatenate([log.rating[chosen], np.zeros(num_sampled, np.uint8)])
    order = random.permutation(len(candidates))
    return HeldOutRequest(
        user_id=int(dataset.users.user_id[user_index]),
        user_index=user_index,
        timestamp_s=int(log.timestamp_s[first]),
        surface=dataset.surfaces[log.surface[first]],
        candidates=candidates[order],
        is_next=order < num_next,
        ratings=ratings[order],
        num_earlier=first - begin,
    )


def held_out_requests(dataset: Dataset, num_next: int, num_sampled: int, seed: int) -> Iterator[HeldOutRequest]:
    """Yield the requests of all test-period users that can have one, in a seeded random order.

    Args:
        dataset: Data with a split.
        num_next: Items chosen next, at least 1.
        num_sampled: Others, at least 0.
        seed: Decides the order of users and every draw.
    """
    users = users_in_test_period(dataset)
    for user_index in np.random.default_rng((seed, len(users))).permutation(users):
        request = held_out_request(dataset, int(user_index), num_next, num_sampled, seed)
        if request is not None:
            yield request


def history_events(dataset: Dataset, until_s: int, max_events: int) -> Iterator[tuple[int, UserEvents]]:
    """Yield (user id, events) of every user who has any: the newest ``max_events`` strictly before ``until_s``.

    Args:
        dataset: The data.
        until_s: Seconds since the epoch; ``dataset.split.test_start_s`` loads all that a server may know.
        max_events: Most events a user, at least 1.

    Raises:
        ValueError: ``max_events`` is under 1.
    """
    if max_events < 1:
        raise ValueError(f"max_events must be at least 1, is {max_events}")
    log = dataset.log
    users = np.arange(log.num_users, dtype=np.int64)
    ends = log.position_before(users, until_s)
    begins = np.maximum(log.user_offsets[:-1], ends - max_events)
    for user_index in np.flatnonzero(ends > begins):
        events = slice(int(begins[user_index]), int(ends[user_index]))
        yield (
            int(dataset.users.user_id[user_index]),
            UserEvents(
                event_id=log.event_id[events],
                item_id=log.item_id[events],
                rating=log.rating[events].astype(np.float32),
                timestamp_s=log.timestamp_s[events],
                surface=log.surface[events],
                profile=dataset.users.profile(int(user_index)),
            ),
        )
