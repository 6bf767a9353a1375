"""Events that could not be written yet: kept to a bound, written in order of arrival once the store is back.

They live in this replica's memory, so a replica that dies takes them with it; the answer to the client says
``buffered`` and not ``appended`` for that reason, and a client that wants certainty sends them again (an event id is
kept once).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from shared.errors import StoreUnavailableError
from shared.schema.api import Event

_WRITE_MAX = 1_000


class EventBuffer:
    """A bounded queue in front of the user log.

    Args:
        events_max: Events that it holds; 0 buffers nothing.
    """

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._events: deque[Event] = deque()

    def __len__(self) -> int:
        """Number of events held."""
        return len(self._events)

    def add(self, events: Sequence[Event]) -> None:
        """Keep events, all or none.

        Raises:
            StoreUnavailableError: they do not fit.
        """
        if len(self._events) + len(events) > self._events_max:
            raise StoreUnavailableError(
                f"the user log is out of reach and the buffer holds {len(self._events)} of {self._events_max} events",
                limit=self._events_max, value=len(self._events) + len(events), stage="sequence",
            )  # fmt: skip
        self._events.extend(events)

    async def flush(self, write: Callable[[Sequence[Event]], Awaitable[object]]) -> int:
        """Write what is held, oldest first; an event leaves the buffer only when it is written.

        A batch that fails half-way is written again later: an event id is kept once.

        Returns:
            Events written.

        Raises:
            StoreUnavailableError: the store is still out of reach; the unwritten events stay.
        """
        num_written = 0
        while self._events:
            batch = [self._events[index] for index in range(min(len(self._events), _WRITE_MAX))]
            await write(batch)
            for _ in batch:
                self._events.popleft()
            num_written += len(batch)
        return num_written
