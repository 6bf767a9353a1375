"""Keeps appended events in memory while the store is down, to a bound, and writes them in order when it is back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from pydantic import Field

from shared.clock import Clock
from shared.config import Config
from shared.errors import DamagedLogError, StoreUnavailableError
from shared.hashing import EntityId, store_token
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog.api import AppendResult, HistoryQuery, UserLoad, UserLog
from shared.userlog.records import check_sources, numbered


class BufferConfig(Config):
    """Limits of the buffer.

    Args:
        events_max: Events held; an append that does not fit whole is refused.
        flush_events_max: Events written at once when the store is back.
        retry_interval_ms: Time between two tries to reach the store.
    """

    events_max: int = Field(50_000, ge=1, le=10_000_000)
    flush_events_max: int = Field(1_000, ge=1, le=100_000)
    retry_interval_ms: int = Field(500, ge=1)


class BufferedUserLog:
    """A ``UserLog`` whose appends survive an outage of the store, though not the end of this process.

    While events wait, later ones wait behind them, so the order of arrival is kept. A background task tries to write
    them; it runs only while there are any. Reads and loads go straight to the store.

    Args:
        log: The log behind it.
        config: Limits.
        clock: Clock of the retries.
        on_lost: Told of events that waited and cannot be written, because their users' logs are damaged.
    """

    def __init__(
        self,
        log: UserLog,
        config: BufferConfig,
        clock: Clock,
        on_lost: Callable[[DamagedLogError], None] | None = None,
    ) -> None:
        self._on_lost = on_lost
        self._log = log
        self._config = config
        self._clock = clock
        self._sources = numbered(log.sources)
        self._waiting: list[Event] = []
        self._flushing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_buffered(self) -> int:
        """Events that wait to be written."""
        return len(self._waiting)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the event sources."""
        return self._log.sources

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """Add events, or keep them if the store is down: ``buffered`` of the result says so.

        Raises:
            InvalidRequestError: an event names a source that the log does not have; none is kept.
            DamagedLogError: some users' logs are damaged; the events of all others are written, none is kept.
            StoreUnavailableError: the store is down and the buffer has no room for all of them; none is kept then.
        """
        check_sources(events, self._sources)  # now: what is refused later would hold up everything behind it for ever
        if not self._waiting:
            try:
                return await self._log.append(events)
            except DamagedLogError:  # waiting helps nobody, and would hold up everybody
                raise
            except StoreUnavailableError as error:
                self._keep(events, error)
        else:
            self._keep(events, None)
        return AppendResult(buffered=len(events))

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """Read from the store; events that still wait are not in it."""
        return await self._log.read(user, before_s, limit)

    async def read_many(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        """Read from the store; events that still wait are not in it."""
        return await self._log.read_many(queries, limit)

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        """Load into the store."""
        return await self._log.load_many(loads)

    async def delete(self, user: EntityId) -> bool:
        """Forget a user, events that wait included."""
        async with self._flushing:  # else a write that is under way could bring the user back
            found = await self._log.delete(user)
            token = store_token(user)
            others = [event for event in self._waiting if store_token(event.user_id) != token]
            found = found or len(others) < len(self._waiting)
            self._waiting = others
        return found

    async def check(self) -> None:
        """Raise unless the store answers."""
        await self._log.check()

    async def flush(self) -> AppendResult:
        """Write what waits, in order of arrival; events whose users' logs are damaged are given up.

        Raises:
            StoreUnavailableError: the store is down; what could not be written waits on.
        """
        result = AppendResult()
        async with self._flushing:
            while self._waiting:
                chunk = self._waiting[: self._config.flush_events_max]
                try:
                    result += await self._log.append(chunk)
                except DamagedLogError as error:
                    if self._on_lost is not None:
                        self._on_lost(error)
                # Only now: a cancelled or failed write leaves them, and writing them twice changes nothing.
                del self._waiting[: len(chunk)]
        return result

    async def aclose(self) -> None:
        """End the background task after one last try to write.

        Raises:
            StoreUnavailableError: events are lost; context has ``num_lost``.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        try:
            await self.flush()
        except StoreUnavailableError as error:
            num_lost = len(self._waiting)
            raise StoreUnavailableError(f"{num_lost} buffered events were lost: {error}", num_lost=num_lost) from error

    def _keep(self, events: Sequence[Event], cause: StoreUnavailableError | None) -> None:
        limit, held = self._config.events_max, len(self._waiting)
        if held + len(events) > limit:
            raise StoreUnavailableError(
                f"the store is down and the buffer holds {held} of {limit} events: no room for {len(events)} more",
                limit=limit,
                value=held + len(events),
            ) from cause
        self._waiting.extend(events)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._keep_trying(), name="userlog.flush")

    async def _keep_trying(self) -> None:
        while self._waiting:
            await self._clock.sleep_s(self._config.retry_interval_ms / 1e3)
            with contextlib.suppress(StoreUnavailableError):  # still down: the next turn tries again
                await self.flush()
