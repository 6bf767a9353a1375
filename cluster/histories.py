"""Loads what a server may know of every user into the user log: events before the held-out period, and profiles.

Loading 900,000 events takes seconds, so the store remembers what it holds: a mark beside the logs, written last. The
mark dies with the store's data; an interrupted load leaves none and is done again, which changes nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from shared.errors import ConfigError
from shared.userlog import UserLoad, UserLog
from shared.userlog.api import SOURCES
from shared.userlog.client import StoreClient, guard
from training.data import Dataset, history_events

_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class HistorySource:
    """Names a load: equal sources put the same events into a store.

    Args:
        dataset: Name of the data set.
        provenance: Its provenance; tells a real one from its stand-in.
        until_s: Events strictly before this time, seconds since the epoch.
        max_events: Newest events of a user.
    """

    dataset: str
    provenance: str
    until_s: int
    max_events: int

    def mark(self, namespace: str) -> str:
        """Return the key of the mark in a store."""
        text = f"{self.dataset}\n{self.provenance}\n{self.until_s}\n{self.max_events}"
        return f"{namespace}:loaded:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load put into the store, now or earlier.

    Args:
        num_users: Users with a profile.
        num_events: Events offered.
        already: The store held it before.
    """

    num_users: int
    num_events: int
    already: bool


class HistoryStore:
    """A user log with its marks.

    Args:
        client: Of the store behind the log; keeps the marks.
        log: The user log.
        namespace: First part of the marks' keys, that of the log.
    """

    def __init__(self, client: StoreClient, log: UserLog, namespace: str) -> None:
        self._client = client
        self._log = log
        self._namespace = namespace

    async def find(self, source: HistorySource) -> Loaded | None:
        """Return what an earlier load of this source put there, None when there was none.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        value = await guard(self._client.get(source.mark(self._namespace)), _TIMEOUT_MS, "read load mark")
        if value is None:
            return None
        num_users, num_events = orjson.loads(value)
        return Loaded(num_users, num_events, already=True)

    async def load(self, source: HistorySource, dataset: Dataset) -> Loaded:
        """Load every user and leave the mark; loading again changes nothing.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses; then there is no mark.
        """
        counts = {"users": 0, "events": 0}

        def counted() -> Iterator[UserLoad]:
            for load in user_loads(dataset, source.until_s, source.max_events, self._log.sources):
                counts["users"] += 1
                counts["events"] += len(load)
                yield load

        await self._log.load_many(counted())
        value = orjson.dumps([counts["users"], counts["events"]])
        await guard(self._client.set(source.mark(self._namespace), value), _TIMEOUT_MS, "write load mark")
        return Loaded(counts["users"], counts["events"], already=False)


def user_loads(dataset: Dataset, until_s: int, max_events: int, sources: Sequence[str] = SOURCES) -> Iterator[UserLoad]:
    """Yield every user of a data set with the events before a time; users without any bring their profile alone.

    Args:
        dataset: The data.
        until_s: Events strictly before this time, seconds since the epoch.
        max_events: Newest events of a user.
        sources: Names of the log's event sources; a surface of the data set is a source.

    Raises:
        ConfigError: the log has no source for a surface of the data set.
    """
    with_events = set()
    if missing := sorted(set(dataset.surfaces) - set(sources)):
        raise ConfigError(
            f"sources must name {', '.join(missing)}, a surface of {dataset.name}; they are {', '.join(sources)}",
            field="sources",
            value=", ".join(sources),
        )
    source_of_surface = np.array([list(sources).index(surface) for surface in dataset.surfaces], np.uint8)
    for user_id, events in history_events(dataset, until_s, max_events):
        with_events.add(user_id)
        yield UserLoad(
            user=user_id,
            item_keys=events.item_id,
            weights=events.rating,
            timestamps_s=events.timestamp_s,
            event_ids=events.event_id,
            profile=events.profile,
            sources=source_of_surface[events.surface],
        )
    nothing, no_weight = np.zeros(0, np.int64), np.zeros(0, np.float32)
    for user_index, user_id in enumerate(dataset.users.user_id.tolist()):
        if user_id not in with_events:
            yield UserLoad(user_id, nothing, no_weight, nothing, nothing, dataset.users.profile(user_index))
