"""What a user log does, whoever keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shared.hashing import EntityId
from shared.schema.api import Event
from shared.schema.user import UserHistory

SOURCES: Final = ("ml-1m", "ml-100k", "feed", "search")
"""Event sources of a log that is told of no others: the surfaces of the data sets."""


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What became of appended events; the four counts add up to their number.

    Args:
        appended: Events that are new in the log.
        duplicates: Events whose id the user's log already holds.
        expired: Events that a full log has no room for: not newer than the oldest one it keeps.
        buffered: Events kept in memory, to be written when the store is back.
    """

    appended: int = 0
    duplicates: int = 0
    expired: int = 0
    buffered: int = 0

    def __add__(self, other: AppendResult) -> AppendResult:
        """Return the sums of the counts."""
        return AppendResult(
            self.appended + other.appended,
            self.duplicates + other.duplicates,
            self.expired + other.expired,
            self.buffered + other.buffered,
        )


@dataclass(frozen=True, slots=True)
class UserLoad:
    """The history of one user, to be loaded in bulk; in any order, n events.

    Args:
        user: Raw user id.
        item_keys: int64 [n], id keys of the items.
        weights: float32 [n].
        timestamps_s: int64 [n], seconds since the epoch.
        event_ids: n ids; an integer array is much faster than strings. ``7`` and ``"7"`` are the same event.
        sources: uint8 [n], numbers of the sources; None: all of the first.
        profile: Attributes of the user; those of an earlier load that have other names stay.
    """

    user: EntityId
    item_keys: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    timestamps_s: npt.NDArray[np.int64]
    event_ids: Sequence[EntityId] | npt.NDArray[np.int64]
    profile: Mapping[str, str] = field(default_factory=dict)
    sources: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        """Number of events n."""
        return len(self.item_keys)


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """Whose history, as of when; a training row holds no more of it than this.

    Args:
        user: Raw user id.
        before_s: Only events strictly before this time, seconds since the epoch.
    """

    user: EntityId
    before_s: int


class UserLog(Protocol):
    """The events of every user, ordered by (timestamp, arrival), one of each event id, at most ``max_events`` a user.

    Of the events that one call brings a user, only the newest ``max_events`` are looked at; in a full log an event must
    be newer than the oldest one. So sending anything again, at any time, changes nothing.

    All methods raise ``StoreUnavailableError`` when the store cannot be reached or refuses.
    """

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the event sources; ``UserHistory.sources`` holds places in it."""
        ...

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """Add events of any users; sending the same events again changes nothing."""
        ...

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """Return the newest ``limit`` events of a user strictly before ``before_s``, oldest first, and the profile."""
        ...

    async def read_many(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        """Return what ``read`` returns for each query, in as few round trips as the log's limits allow."""
        ...

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        """Add whole histories and profiles; loading the same again changes nothing."""
        ...

    async def delete(self, user: EntityId) -> bool:
        """Forget a user, events and profile; return whether there was anything."""
        ...

    async def check(self) -> None:
        """Raise unless the store answers."""
        ...
