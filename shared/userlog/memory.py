"""The user log in plain Python: what the real one must do, for tests and simulation, gone with the process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from shared.errors import StoreUnavailableError
from shared.hashing import EntityId, id_key, store_token
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog.api import SOURCES, AppendResult, HistoryQuery, UserLoad
from shared.userlog.records import check_sources, numbered, source_number

_Entry: TypeAlias = tuple[int, int, int, float, int]
"""timestamp, event key, item key, weight, source."""


class MemoryUserLog:
    """A ``UserLog`` in dictionaries.

    Args:
        max_events: Newest events kept a user.
        sources: Names of the sources.

    Attributes:
        down: Set it to make every call raise ``StoreUnavailableError``, as if the store were out of reach.
    """

    def __init__(self, max_events: int = 4_096, sources: Sequence[str] = SOURCES) -> None:
        self.sources = tuple(sources)
        self._sources = numbered(sources)
        self._max_events = max_events
        self._logs: dict[str, list[_Entry]] = {}
        self._num_gone: dict[str, int] = {}
        self._profiles: dict[str, dict[str, str]] = {}
        self.down = False

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """Add events."""
        await self.check()
        by_user: dict[str, list[_Entry]] = {}
        check_sources(events, self._sources)
        for event in events:
            source = source_number(event.source, self._sources)
            entry = (event.timestamp_s, id_key(event.event_id), id_key(event.item_id), float(event.weight), source)
            by_user.setdefault(store_token(event.user_id), []).append(entry)
        return sum((self._merge(token, entries) for token, entries in by_user.items()), AppendResult())

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """Return the newest events before a time."""
        await self.check()
        if limit < 0:
            raise ValueError(f"limit must be 0 or more, is {limit}")
        token = store_token(user)
        log = self._logs.get(token, [])
        stop = bisect_left(log, before_s, key=itemgetter(0))
        newest = log[max(stop - limit, 0) : stop]
        return UserHistory(
            item_keys=np.array([entry[2] for entry in newest], np.int64),
            weights=np.array([entry[3] for entry in newest], np.float32),
            timestamps_s=np.array([entry[0] for entry in newest], np.int64),
            num_total=self._num_gone.get(token, 0) + stop if stop else 0,
            profile=dict(self._profiles.get(token, {})),
            sources=np.array([entry[4] for entry in newest], np.uint8),
        )

    async def read_many(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        """Return the newest events before a time, of many users."""
        return [await self.read(query.user, query.before_s, limit) for query in queries]

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        """Add whole histories."""
        await self.check()
        result = AppendResult()
        for load in loads:
            token = store_token(load.user)
            sources = np.zeros(len(load), np.uint8) if load.sources is None else load.sources
            columns = (load.timestamps_s, load.event_ids, load.item_keys, load.weights, sources)
            entries = [
                (int(time), id_key(event if isinstance(event, str) else int(event)), int(item), float(weight), int(of))
                for time, event, item, weight, of in zip(*columns, strict=True)
            ]
            result += self._merge(token, entries)
            if load.profile:
                self._profiles.setdefault(token, {}).update(load.profile)
        return result

    async def delete(self, user: EntityId) -> bool:
        """Forget a user."""
        await self.check()
        token = store_token(user)
        had_log = self._logs.pop(token, None) is not None
        self._num_gone.pop(token, None)
        had_profile = self._profiles.pop(token, None) is not None
        return had_log or had_profile

    async def check(self) -> None:
        """Raise while ``down``."""
        if self.down:
            raise StoreUnavailableError("the store is down")

    def _merge(self, token: str, entries: list[_Entry]) -> AppendResult:
        log = self._logs.get(token, [])
        distinct: dict[int, _Entry] = {}
        for entry in entries:
            distinct.setdefault(entry[1], entry)
        newest = sorted(distinct.values(), key=itemgetter(0))[-self._max_events :]  # stable: equal times by arrival
        known = {entry[1] for entry in log}
        unknown = [entry for entry in newest if entry[1] not in known]
        # In a full log an event must be newer than the oldest one, or one that was cut could come back.
        oldest = log[0][0] if len(log) >= self._max_events else -1
        added = [entry for entry in unknown if entry[0] > oldest]
        if added:
            merged = sorted([*log, *added], key=itemgetter(0))
            self._logs[token] = merged[-self._max_events :]
            num_cut = len(merged) - len(self._logs[token])
            self._num_gone[token] = self._num_gone.get(token, 0) + num_cut
        return AppendResult(
            appended=len(added),
            duplicates=len(entries) - len(distinct) + len(newest) - len(unknown),
            expired=len(distinct) - len(newest) + len(unknown) - len(added),
        )
