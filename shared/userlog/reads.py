"""Reads of one history in as many round trips as its length asks, as one consistent history.

A script holds the store, and decoding its reply the event loop, for as long as the events are many. So one trip reads
a bounded number of them, newest first, and between two trips whoever waits gets a turn. What is put together is the
log as it was in the first trip: events that come later lie in newer blocks than any later trip asks for, and where a
late event, a deletion or a cut of old blocks took away what was still to be read, the read begins anew. After
``restarts_max`` of these it is made in one trip, which nothing can come between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shared.schema.user import UserHistory
from shared.userlog.blocks import EventColumns

WHOLE: Final = 2**31
"""Events in one trip of a read that is not to be cut; more than any log holds."""


@dataclass(slots=True)
class _Held:
    """What the trips so far brought, newest blocks first."""

    num_all: int = 0
    num_gone: int = 0
    num_went: int = 0
    epoch: int = 0
    below: int = 0
    num_later: int = 0
    num_found: int = 0
    profile: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[EventColumns, int, int]] = field(default_factory=list)


class HistoryRead:
    """One read under way.

    Args:
        before_s: Only events strictly before this time.
        limit: Newest events wanted, 0 or more.
        keep: Newest events that the log shows.
        events_max: Events after which a trip ends.
        restarts_max: How often the read begins anew before it is made in one trip.

    Attributes:
        done: Whether ``history`` is complete.
        num_trips: Trips so far.
        num_restarts: How often it began anew.
    """

    def __init__(self, before_s: int, limit: int, keep: int, events_max: int, restarts_max: int) -> None:
        self._before_s = before_s
        self._limit = min(limit, keep)
        self._keep = keep
        self._events_max = events_max
        self._restarts_max = restarts_max
        self._held = _Held()
        self.done = False
        self.num_trips = 0
        self.num_restarts = 0

    def arguments(self, block_events: int) -> tuple[int, ...]:
        """Return the arguments of the next trip's script."""
        held = self._held
        events_max = self._events_max if self.num_restarts <= self._restarts_max else WHOLE
        limit = self._limit - held.num_found
        return self._before_s, limit, self._keep, block_events, events_max, held.epoch, held.below

    def take(self, reply: Any, columns: EventColumns, number: int) -> None:
        """Take the reply of a trip.

        Args:
            reply: What the script returned.
            columns: Decoded blocks of this reply and others.
            number: Which of the strings in ``columns`` is this reply's.
        """
        self.num_trips += 1
        num_all, num_later, _, num_found, profile, num_gone, epoch, below, num_went = reply
        held = self._held
        if held.below == 0:
            held.num_all, held.num_gone, held.epoch, held.num_went = num_all, num_gone, epoch, num_went
            pairs = iter(part.decode() for part in profile)
            held.profile = dict(zip(pairs, pairs, strict=True))
        held.num_later += num_later
        held.num_found += num_found
        # All there is, yet less than the limit: then nothing may have been cut since the first trip.
        is_cut = below == 0 and held.num_found < self._limit and num_gone != held.num_gone
        if below < 0 or is_cut:
            self.num_restarts += 1
            self._held = _Held()
            return
        held.pieces.append((columns, int(columns.offsets[number]), int(columns.offsets[number + 1])))
        held.below = below
        self.done = below == 0

    def history(self) -> UserHistory:
        """Return what was read, cut to its time and to ``limit`` events.

        The columns are copied: a small history must not hold a large reply.
        """
        held = self._held
        num_beyond = 0
        for columns, begin, end in held.pieces:
            times = columns.timestamps_s[begin:end]
            num_beyond += len(times) - int(np.searchsorted(times, self._before_s, side="left"))
        num_hidden = max(held.num_all - self._keep, 0)
        num_shown = max(held.num_all - held.num_later - num_beyond - num_hidden, 0)
        stop = sum(end - begin for _, begin, end in held.pieces) - num_beyond
        newest = slice(max(stop - min(self._limit, num_shown), 0), stop)
        return UserHistory(
            item_keys=self._joined("item_keys")[newest].copy(),
            weights=self._joined("weights")[newest].copy(),
            timestamps_s=self._joined("timestamps_s")[newest].copy(),
            # What went is older than all that is shown; where none is, nobody knows whether it is before the time.
            num_total=held.num_went + num_hidden + num_shown if num_shown else 0,
            profile=held.profile,
            sources=self._joined("sources")[newest].copy(),
        )

    def _joined(self, name: str) -> Any:
        """Return a column of all pieces, oldest first: of one piece without a copy."""
        parts = [getattr(columns, name)[begin:end] for columns, begin, end in reversed(self._held.pieces)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
