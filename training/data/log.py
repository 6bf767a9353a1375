"""The event log: what every user did, kept once, and rows that point into it instead of carrying a history.

Events lie user after user, each user's in (timestamp, item) order, so a history is one contiguous slice and reading it
is index arithmetic. Training rows are late-materialised: a row knows its event and its labels; its history is read from
the log when the batch is made (``training.data.history``), never copied into the row.

Shape letters: E events of the log, N rows, U users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import DataUnavailableError

CLICK_RATING_MIN = 4
"""Smallest rating that counts as a click."""

CONVERSION_RATING_MIN = 5
"""Smallest rating that counts as a conversion; every conversion is a click."""


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Events in any order, before they become a log.

    Args:
        user_index: int32 [E], position of the user in the user table.
        item_id: int64 [E], at least 1.
        rating: uint8 [E], 1 to 5.
        timestamp_s: int64 [E], seconds since the epoch.
        surface: uint8 [E], position in ``Dataset.surfaces``; None: all 0.
        slot: uint8 [E], place on the page, 0 the first; None: all 0.
    """

    user_index: npt.NDArray[np.int32]
    item_id: npt.NDArray[np.int64]
    rating: npt.NDArray[np.uint8]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8] | None = None
    slot: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class EventLog:
    """All events, sorted by (user, timestamp, item); user ``u`` owns ``[user_offsets[u], user_offsets[u + 1])``.

    Args:
        user_offsets: int64 [U + 1], non-decreasing, from 0 to E.
        user_index: int32 [E], owner of each event.
        item_id: int64 [E], at least 1; 0 is the padding of readers.
        rating: uint8 [E], 1 to 5.
        timestamp_s: int64 [E], seconds since the epoch.
        surface: uint8 [E], position in ``Dataset.surfaces``.
        slot: uint8 [E], place on the page, 0 the first.
        time_order: int64 [E], event positions in global (timestamp, user, item) order.
        event_id: int64 [E], 1 + the event's rank in that order: the same in every process.
        second_start: int64 [E], position of the first event of the same user in the same second, so
            ``[user_offsets[user_index[e]], second_start[e])`` are the events strictly earlier than event ``e``.
    """

    user_offsets: npt.NDArray[np.int64]
    user_index: npt.NDArray[np.int32]
    item_id: npt.NDArray[np.int64]
    rating: npt.NDArray[np.uint8]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.uint8]
    time_order: npt.NDArray[np.int64]
    event_id: npt.NDArray[np.int64]
    second_start: npt.NDArray[np.int64]

    @classmethod
    def build(cls, columns: EventColumns, num_users: int) -> EventLog:
        """Sort events into a log; equal (user, timestamp, item) keep their input order.

        Args:
            columns: Events in any order.
            num_users: U; users without events own an empty slice.

        Raises:
            DataUnavailableError: a user is not in ``[0, num_users)``, an item id is under 1, or a rating is not 1 to 5.
        """
        _check(columns, num_users)
        by_user = np.lexsort((columns.item_id, columns.timestamp_s, columns.user_index))
        user_index = columns.user_index[by_user].astype(np.int32)
        num_events = len(by_user)
        return cls.from_sorted(
            user_index=user_index,
            item_id=columns.item_id[by_user].astype(np.int64),
            rating=columns.rating[by_user].astype(np.uint8),
            timestamp_s=columns.timestamp_s[by_user].astype(np.int64),
            surface=np.zeros(num_events, np.uint8) if columns.surface is None else columns.surface[by_user],
            slot=np.zeros(num_events, np.uint8) if columns.slot is None else columns.slot[by_user],
            num_users=num_users,
        )

    @classmethod
    def from_sorted(
        cls,
        *,
        user_index: npt.NDArray[np.int32],
        item_id: npt.NDArray[np.int64],
        rating: npt.NDArray[np.uint8],
        timestamp_s: npt.NDArray[np.int64],
        surface: npt.NDArray[np.uint8],
        slot: npt.NDArray[np.uint8],
        num_users: int,
    ) -> EventLog:
        """Make a log of columns that are in (user, timestamp, item) order already; the columns are not copied."""
        num_events = len(user_index)
        counts = np.bincount(user_index, minlength=num_users)
        user_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        # Stable, and position order is (user, timestamp, item) order: only the timestamp is left to sort by.
        time_order = np.argsort(timestamp_s, kind="stable").astype(np.int64)
        event_id = np.empty(num_events, np.int64)
        event_id[time_order] = np.arange(1, num_events + 1)
        return cls(
            user_offsets=user_offsets,
            user_index=user_index,
            item_id=item_id,
            rating=rating,
            timestamp_s=timestamp_s,
            surface=surface,
            slot=slot,
            time_order=time_order,
            event_id=event_id,
            second_start=_second_starts(user_index, timestamp_s),
        )

    def __len__(self) -> int:
        """Number of events E."""
        return len(self.item_id)

    @property
    def num_users(self) -> int:
        """Number of users U, those without events included."""
        return len(self.user_offsets) - 1

    def position_before(
        self, user_index: npt.NDArray[np.integer], timestamp_s: npt.NDArray[np.int64] | int
    ) -> npt.NDArray[np.int64]:
        """Return where each user's events strictly earlier than a time end.

        Args:
            user_index: integers [N] in ``[0, U)``.
            timestamp_s: int64 [N] or one time for all.

        Returns:
            int64 [N]: the earlier events of ``user_index[i]`` are ``[user_offsets[user_index[i]], result[i])``.
        """
        low: npt.NDArray[np.int64] = self.user_offsets[user_index]
        high: npt.NDArray[np.int64] = self.user_offsets[np.asarray(user_index) + 1]
        limit = np.broadcast_to(np.asarray(timestamp_s, np.int64), low.shape)
        # Binary search in all slices at once: at most log2(longest slice) + 1 rounds.
        while True:
            open_ = low < high
            if not open_.any():
                return low
            middle = (low + high) >> 1
            earlier = open_ & (self.timestamp_s[np.minimum(middle, max(len(self) - 1, 0))] < limit)
            low = np.where(earlier, middle + 1, low)
            high = np.where(open_ & ~earlier, middle, high)

    def num_earlier(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many events of the same user lie before each event in sorted order: int64 [N] -> int64 [N]."""
        return positions - self.user_offsets[self.user_index[positions]]

    def rows(self, positions: npt.NDArray[np.int64]) -> Rows:
        """Return the rows of the events at ``positions`` (int64 [N]), in that order."""
        rating = self.rating[positions]
        return Rows(
            user_index=self.user_index[positions],
            item_id=self.item_id[positions],
            timestamp_s=self.timestamp_s[positions],
            surface=self.surface[positions],
            slot=self.slot[positions],
            click=rating >= CLICK_RATING_MIN,
            conversion=rating >= CONVERSION_RATING_MIN,
            event_position=positions,
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Late-materialised rows: N impressions with labels, each pointing at its event in the log.

    Args:
        user_index: int32 [N].
        item_id: int64 [N], the candidate.
        timestamp_s: int64 [N], request time.
        surface: uint8 [N], position in ``Dataset.surfaces``.
        slot: uint8 [N], place on the page.
        click: bool [N], label.
        conversion: bool [N], label; true only where ``click`` is.
        event_position: int64 [N], position of the row's own event in the log.
    """

    user_index: npt.NDArray[np.int32]
    item_id: npt.NDArray[np.int64]
    timestamp_s: npt.NDArray[np.int64]
    surface: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.uint8]
    click: npt.NDArray[np.bool_]
    conversion: npt.NDArray[np.bool_]
    event_position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.item_id)

    def select(self, which: slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Rows:
        """Return the chosen rows; a slice gives views, nothing is copied."""
        return Rows(
            user_index=self.user_index[which],
            item_id=self.item_id[which],
            timestamp_s=self.timestamp_s[which],
            surface=self.surface[which],
            slot=self.slot[which],
            click=self.click[which],
            conversion=self.conversion[which],
            event_position=self.event_position[which],
        )

    def batches(self, num_rows: int) -> Iterator[Rows]:
        """Yield consecutive batches of ``num_rows`` rows (the last may be shorter), in order.

        Raises:
            ValueError: ``num_rows`` is under 1.
        """
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, is {num_rows}")
        for start in range(0, len(self), num_rows):
            yield self.select(slice(start, start + num_rows))


def _check(columns: EventColumns, num_users: int) -> None:
    checks = (("user_index", columns.user_index, 0, num_users - 1), ("rating", columns.rating, 1, 5))
    for field, values, low, high in checks:
        if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
            found = f"{values.min()} to {values.max()}"
            raise DataUnavailableError(
                f"event {field} must be {low} to {high}, is {found}", field=field, limit=f"{low} to {high}", value=found
            )
    if len(columns.item_id) and int(columns.item_id.min()) < 1:
        lowest = int(columns.item_id.min())
        raise DataUnavailableError(
            f"event item_id must be at least 1, is {lowest}", field="item_id", limit=1, value=lowest
        )


def _second_starts(user_index: npt.NDArray[np.int32], timestamp_s: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    positions = np.arange(len(user_index), dtype=np.int64)
    if not len(positions):
        return positions
    opens = np.ones(len(positions), np.bool_)
    opens[1:] = (user_index[1:] != user_index[:-1]) | (timestamp_s[1:] != timestamp_s[:-1])
    return np.maximum.accumulate(np.where(opens, positions, 0))
