"""The store of user log and embeddings in dictionaries, one round trip away, with outages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Self

from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.simulation.network import Network
from shared.errors import StoreUnavailableError
from shared.hashing import EntityId
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog import AppendResult, HistoryQuery, MemoryUserLog, UserLoad

TIMEOUT_S: Final = 1.0
"""``StoreConfig.io_timeout_ms``: a call whose caller is gone, and whose cancellation was lost, ends by this."""


class SimulatedStore:
    """The server, and the way to it.

    Args:
        network: Time and delays.

    Attributes:
        is_down: Every command fails.
        is_silent: Every command waits for ever.
        slow_s: What every command takes beside its way.
        log: The events.
        hashes: The embeddings.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.is_down = False
        self.is_silent = False
        self.slow_s = 0.0
        self.log = MemoryUserLog()
        self.hashes = SimulatedHashes(self.trip)

    async def trip(self) -> None:
        """Make one round trip.

        Raises:
            RedisConnectionError: the store is down.
        """
        await self._network.travel()
        if self.is_silent:
            await self._network.lose()
        if self.slow_s:
            await self._network.wait_s(self.slow_s)
        if self.is_down:
            raise RedisConnectionError("nothing listens")


class SimulatedUserLog:
    """A ``UserLog`` one round trip away.

    Args:
        store: Where it is.
    """

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``UserLog``."""
        return self._store.log.sources

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """See ``UserLog``."""
        await self.check()
        return await self._store.log.append(events)

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """See ``UserLog``."""
        await self.check()
        return await self._store.log.read(user, before_s, limit)

    async def read_many(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        """See ``UserLog``."""
        await self.check()
        return await self._store.log.read_many(queries, limit)

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        """See ``UserLog``."""
        await self.check()
        return await self._store.log.load_many(loads)

    async def delete(self, user: EntityId) -> bool:
        """See ``UserLog``."""
        await self.check()
        return await self._store.log.delete(user)

    async def check(self) -> None:
        """See ``UserLog``; a store that is silent is given up after ``TIMEOUT_S``, as the real client does."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._store.trip()
        except TimeoutError as error:
            raise StoreUnavailableError(f"user log: no answer in {TIMEOUT_S} s", stage="sequence") from error
        except RedisConnectionError as error:
            raise StoreUnavailableError(f"user log: {error}", stage="sequence") from error


class SimulatedHashes:
    """What the speculative store uses of a Redis client, in a dictionary.

    Args:
        trip: Makes one round trip; raises when nothing listens.

    Attributes:
        values: Fields and values by key.
        expiries: Key to the time to live it was last given, seconds; nothing is forgotten.
    """

    def __init__(self, trip: Callable[[], Awaitable[None]]) -> None:
        self.trip = trip
        self.values: dict[str, dict[bytes, bytes]] = {}
        self.expiries: dict[str, int] = {}

    async def hvals(self, name: str) -> list[bytes]:
        """Return the values of a hash."""
        await self.trip()
        return list(self.values.get(name, {}).values())

    async def hdel(self, name: str, *keys: bytes) -> int:
        """Delete fields of a hash."""
        await self.trip()
        held = self.values.get(name, {})
        return sum(held.pop(key, None) is not None for key in keys)

    def pipeline(self, transaction: bool = True) -> _Pipeline:
        """Return a pipeline: all of it in one round trip."""
        return _Pipeline(self)

    def put(self, name: str, mapping: Mapping[bytes, bytes]) -> int:
        """Set fields at the server."""
        held = self.values.setdefault(name, {})
        num_new = len(mapping.keys() - held.keys())
        held.update(mapping)
        return num_new


class _Pipeline:
    def __init__(self, hashes: SimulatedHashes) -> None:
        self._hashes = hashes
        self._commands: list[Callable[[], object]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def hvals(self, name: str) -> None:
        self._commands.append(lambda: list(self._hashes.values.get(name, {}).values()))

    def unlink(self, name: str) -> None:
        self._commands.append(lambda: int(self._hashes.values.pop(name, None) is not None))

    def hset(self, name: str, *, mapping: Mapping[bytes, bytes]) -> None:
        self._commands.append(lambda: self._hashes.put(name, mapping))

    def expire(self, name: str, time: int) -> None:
        self._commands.append(lambda: self._expire(name, time))

    def hlen(self, name: str) -> None:
        self._commands.append(lambda: len(self._hashes.values.get(name, {})))

    async def execute(self) -> list[object]:
        await self._hashes.trip()
        return [command() for command in self._commands]

    def _expire(self, name: str, time: int) -> int:
        self._hashes.expiries[name] = time
        return 1
