"""The user log in a Redis-protocol store: append and read are one script each, mostly in one round trip each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import Field
from redis.exceptions import NoScriptError, RedisError

from shared.clock import give_way
from shared.config import Config
from shared.errors import DamagedLogError
from shared.hashing import EntityId, store_token
from shared.log import redact_text
from shared.schema.api import Event, Name
from shared.schema.user import UserHistory
from shared.userlog.api import SOURCES, AppendResult, HistoryQuery, UserLoad
from shared.userlog.blocks import decode_blocks, encode_blocks
from shared.userlog.client import StoreClient, guard, is_about_the_log
from shared.userlog.reads import HistoryRead
from shared.userlog.records import RECORD, RECORD_BYTES, check_sources, numbered, pack_events, pack_load
from shared.userlog.scripts import APPEND, LOAD, READ, Script

_LAYOUT: Final = "log2"
"""Names the layout in the key: another layout gets another key and never reads this one's bytes by mistake."""

_OLD_LAYOUT: Final = "log1"
"""Of the release before; taken over when its user is first touched."""

_USERS_SHOWN: Final = 8

_Records: TypeAlias = list[tuple[str, bytes]]
_Profiles: TypeAlias = list[tuple[str, dict[Any, Any]]]
_Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""Token of a user, arguments of a script."""


class UserLogConfig(Config):
    """Limits of the user log.

    Args:
        namespace: First part of every key; two meshes on one store take two.
        max_events: Newest events kept a user. Event ids are remembered exactly as long as their events.
        block_events: Events of a full block: more make a log smaller and an append dearer.
        ttl_s: A log goes when its user has brought no event for so long; None: never. What is gone reads as no history.
        sources: Names of the event sources; their places are stored, so new names go to the end.
        timeout_ms: How long one append or read may take, waiting for a connection included.
        load_timeout_ms: How long one round trip of a bulk load may take.
        batch_users_max: Users in one round trip of an append, a bulk load or a read. The store works off a whole trip
            before it answers anybody else: with 256 users a trip, others' reads had ten times the p99.
        batch_bytes_max: Bytes of events (29 each) from which on a round trip takes no further user.
        read_events_max: Events of one user after which a round trip of a read ends, a whole block at least; a longer
            history takes several. The store answers nobody else for as long as it reads them (2,048: 0.1 ms), and this
            process does nothing else while it takes and decodes them (0.4 ms); each further trip costs 0.2 ms.
        read_restarts_max: How often a read in several trips begins anew because the log was rewritten or cut under it,
            before it is made in one.
        append_events_max: Events of one user that one step of the store appends (about 10 us each); more take several
            steps in order of time, as if each were an append of its own.
        append_blocks_max: Blocks of one user that one step rewrites because events came late (0.2 ms each); late events
            of further ones take further steps.
    """

    namespace: str = Field("rankmesh", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    max_events: int = Field(4_096, ge=1, le=1_000_000)
    block_events: int = Field(64, ge=1, le=512)
    ttl_s: int | None = Field(None, ge=1, le=2**31)
    sources: tuple[Name, ...] = Field(SOURCES, min_length=1, max_length=256)
    timeout_ms: int = Field(1_000, ge=1)
    load_timeout_ms: int = Field(10_000, ge=1)
    batch_users_max: int = Field(32, ge=1, le=10_000)
    batch_bytes_max: int = Field(262_144, ge=1_024)
    read_events_max: int = Field(2_048, ge=1, le=1_000_000)
    read_restarts_max: int = Field(3, ge=0, le=100)
    append_events_max: int = Field(128, ge=1, le=100_000)
    append_blocks_max: int = Field(8, ge=1, le=100_000)


class RedisUserLog:
    """The events of every user, ordered by (timestamp, arrival), one of each event id, bounded.

    Any number of processes may append and read at once: each change of a user's log is one script.

    Args:
        client: From ``client.connect``; answers must be bytes (``decode_responses`` off).
        config: Limits.
    """

    def __init__(self, client: StoreClient, config: UserLogConfig) -> None:
        self._client = client
        self._config = config
        self._sources = numbered(config.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the event sources."""
        return self._config.sources

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """Add events of any users, in as many round trips as the limits ask, mostly one.

        When it raises, some users' events may be written; sending all again is right.

        Raises:
            InvalidRequestError: an event names a source that the log does not have; nothing is written.
            DamagedLogError: some users' logs are damaged; the events of all others are written.
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        check_sources(events, self._sources)
        by_user: dict[str, list[Event]] = {}
        for event in events:
            by_user.setdefault(store_token(event.user_id), []).append(event)
        result = AppendResult()
        records: _Records = []
        for token, own in by_user.items():
            packed, duplicates, expired = pack_events(own, self._config.max_events, self._sources)
            result += AppendResult(duplicates=duplicates, expired=expired)
            records.append((token, packed))
        return result + await self._append(records, self._config.timeout_ms)

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """Return the newest events of a user strictly before a time, and the profile.

        One round trip, or one for each ``read_events_max`` events: the log as it was in the first of them.

        Args:
            user: Raw user id.
            before_s: Seconds since the epoch.
            limit: Events to return at most, 0 or more.

        Raises:
            ValueError: ``limit`` is negative.
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        (history,) = await self.read_many([HistoryQuery(user, before_s)], limit)
        return history

    async def read_many(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        """Return what ``read`` returns for each query, as many users a round trip as the limits of a batch let.

        Args:
            queries: B users and times; a user may stand there more than once.
            limit: Events to return of each at most, 0 or more.

        Raises:
            ValueError: ``limit`` is negative.
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        if limit < 0:
            raise ValueError(f"limit must be 0 or more, is {limit}")
        config = self._config
        user_bytes = RECORD_BYTES * max(min(limit, config.read_events_max, config.max_events), 1)
        num_users = min(config.batch_users_max, max(config.batch_bytes_max // user_bytes, 1))
        found: list[UserHistory] = []
        for start in range(0, len(queries), num_users):
            reading = self._read(queries[start : start + num_users], limit)
            found += await guard(reading, config.timeout_ms, "read user log")
        return found

    async def load(
        self,
        user: EntityId,
        item_keys: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        timestamps_s: npt.NDArray[np.int64],
        event_ids: Sequence[EntityId] | npt.NDArray[np.int64],
        profile: Mapping[str, str],
    ) -> AppendResult:
        """Add the history and profile of one user; see ``UserLoad`` and ``load_many``."""
        return await self.load_many([UserLoad(user, item_keys, weights, timestamps_s, event_ids, profile)])

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        """Add whole histories and profiles, many users a round trip; loading the same again changes nothing.

        Raises:
            ValueError: the columns of a history differ in length.
            StoreUnavailableError: the store cannot be reached or refuses; what was loaded so far stays.
        """
        batch = _Batch(self._config)
        result = AppendResult()
        for load in loads:
            token = store_token(load.user)
            if len(load):
                packed, duplicates, expired = pack_load(load, self._config.max_events)
                result += AppendResult(duplicates=duplicates, expired=expired)
                batch.add_records(token, packed)
            if load.profile:
                batch.profiles.append((token, dict(load.profile)))
            if batch.is_full():
                result += await self._load(*batch.take())
        return result + await self._load(*batch.take())

    async def delete(self, user: EntityId) -> bool:
        """Forget a user, events and profile; return whether there was anything.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        token = store_token(user)
        return bool(await guard(self._client.unlink(*self._keys(token)), self._config.timeout_ms, "delete user"))

    async def check(self) -> None:
        """Raise unless the store answers.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        await guard(self._client.ping(), self._config.timeout_ms, "ping store")

    async def _append(self, records: _Records, timeout_ms: int) -> AppendResult:
        """Append in rounds, of each user at most ``append_events_max`` events in one: the oldest in the first."""
        result = AppendResult()
        num_bytes, num_lost = self._config.append_events_max * RECORD_BYTES, 0
        batch = _Batch(self._config)
        damaged: dict[str, RedisError] = {}
        while records:
            rest: dict[str, bytes] = {}
            for token, packed in records:
                batch.add_records(token, packed[:num_bytes])
                if batch.is_full():
                    appending = self._append_batch(batch.take()[0], damaged, rest)
                    result += await guard(appending, timeout_ms, "append to user log")
            appending = self._append_batch(batch.take()[0], damaged, rest)
            result += await guard(appending, timeout_ms, "append to user log")
            num_lost += sum(len(packed) for token, packed in records if token in damaged) // RECORD_BYTES
            left = [(token, rest.get(token, b"") + packed[num_bytes:]) for token, packed in records]
            records = [(token, packed) for token, packed in left if packed and token not in damaged]
        if damaged:
            raise _damaged("append to user log", damaged, num_lost)
        return result

    async def _append_batch(
        self, records: _Records, damaged: dict[str, RedisError], rest: dict[str, bytes]
    ) -> AppendResult:
        """Append one batch; note the users whose logs are damaged, and what the store left for another round."""
        config = self._config
        limits = (config.max_events, config.block_events, config.ttl_s or 0, config.append_blocks_max)
        replies = await self._replies(APPEND, [(token, (packed, *limits)) for token, packed in records])
        # One user's log must not hold up the others': whoever waits to write would wait for ever.
        damaged |= {token: reply for (token, _), reply in zip(records, replies, strict=True) if _is_damage(reply)}
        fates = _sound([b"" if _is_damage(reply) else reply for reply in replies])
        for (token, packed), own in zip(records, fates, strict=True):
            if b"r" in own:
                rest[token] = _chosen(packed, own)
        every = b"".join(fates)
        return AppendResult(appended=every.count(b"a"), duplicates=every.count(b"d"), expired=every.count(b"x"))

    async def _load(self, records: _Records, profiles: _Profiles) -> AppendResult:
        """Write whole histories; what meets a log that is there is appended to it."""
        timeout_ms = self._config.load_timeout_ms
        num_new, others = await guard(self._load_batch(records, profiles), timeout_ms, "append to user log")
        return AppendResult(appended=num_new) + await self._append(others, timeout_ms)

    async def _load_batch(self, records: _Records, profiles: _Profiles) -> tuple[int, _Records]:
        """Write histories as blocks that are ready; return the events written and what met a log that is there."""
        ttl_s = self._config.ttl_s or 0
        calls: list[_Call] = []
        for token, packed in records:
            blocks = encode_blocks(np.frombuffer(packed, RECORD), self._config.block_events)
            calls.append((token, (ttl_s, len(packed) // RECORD_BYTES, *blocks)))
        taken = await self._run(LOAD, calls)
        if profiles:
            async with self._client.pipeline(transaction=False) as pipe:
                for token, profile in profiles:
                    key = self._keys(token)[2]
                    pipe.hset(key, mapping=profile)
                    if ttl_s:
                        pipe.expire(key, ttl_s)
                await pipe.execute()
        num_new = sum(call[1][1] for call, new in zip(calls, taken, strict=True) if new)
        return num_new, [one for one, new in zip(records, taken, strict=True) if not new]

    async def _read(self, queries: Sequence[HistoryQuery], limit: int) -> list[UserHistory]:
        config = self._config
        limits = (limit, config.max_events, config.read_events_max, config.read_restarts_max)
        reads = [HistoryRead(query.before_s, *limits) for query in queries]
        pending = [(store_token(query.user), read) for query, read in zip(queries, reads, strict=True)]
        while pending:
            calls = [(token, read.arguments(config.block_events)) for token, read in pending]
            replies = [msgpack.unpackb(reply, raw=True) for reply in await self._run(READ, calls)]
            columns = decode_blocks([reply[2] for reply in replies])
            for number, (_, read) in enumerate(pending):
                read.take(replies[number], columns, number)
            await give_way()  # a read that waits for this process comes before the next trip of a long one
            pending = [one for one in pending if not one[1].done]
        return [read.history() for read in reads]

    async def _run(self, script: Script, calls: Sequence[_Call]) -> list[Any]:
        """Run a script for each user; what the server refuses is raised."""
        replies = await self._replies(script, calls)
        if damaged := {token: reply for (token, _), reply in zip(calls, replies, strict=True) if _is_damage(reply)}:
            raise _damaged("read user log", damaged)
        return _sound(replies)

    async def _replies(self, script: Script, calls: Sequence[_Call]) -> list[Any]:
        """Run a script for each user in one round trip, in two when the server does not have it."""
        if not calls:
            return []
        replies = await self._pipelined(script, calls)
        lost = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lost:  # first use, or the server restarted
            await self._client.script_load(script.text)
            again = await self._pipelined(script, [calls[index] for index in lost])
            for index, reply in zip(lost, again, strict=True):
                replies[index] = reply
        return replies

    async def _pipelined(self, script: Script, calls: Sequence[_Call]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipe:
            for token, args in calls:
                # As a command: the method of that name refuses in a cluster, where keys of one slot are fine.
                pipe.execute_command("EVALSHA", script.sha, 3, *self._keys(token), *args)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    def _keys(self, token: str) -> tuple[str, str, str]:
        # Braces: all keys of a user lie in one cluster slot.
        user = f"{self._config.namespace}:{{{token}}}"
        return f"{user}:{_LAYOUT}", f"{user}:{_OLD_LAYOUT}", f"{user}:profile"


def _chosen(packed: bytes, fates: bytes) -> bytes:
    """Return the records that the store left."""
    starts = [RECORD_BYTES * place for place, fate in enumerate(fates) if fate == ord("r")]
    return b"".join(packed[start : start + RECORD_BYTES] for start in starts)


def _is_damage(reply: object) -> bool:
    """Return whether a reply refuses because of what lies in the user's log."""
    return isinstance(reply, RedisError) and is_about_the_log(reply)


def _sound(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply
    return replies


def _damaged(action: str, found: Mapping[str, RedisError], num_events: int = 0) -> DamagedLogError:
    """Return the error that names up to eight users, as the store's keys do, and what the store says of the first."""
    users = ", ".join(list(found)[:_USERS_SHOWN])
    more = f" and {len(found) - _USERS_SHOWN} more" if len(found) > _USERS_SHOWN else ""
    why = redact_text(str(next(iter(found.values()))))
    message = f"{action}: the log of {users}{more} cannot be used: {why}"
    return DamagedLogError(message, users=users, value=len(found), num_events=num_events)


class _Batch:
    """What the next round trip writes."""

    def __init__(self, config: UserLogConfig) -> None:
        self._config = config
        self._num_bytes = 0
        self._records: _Records = []
        self.profiles: _Profiles = []

    def add_records(self, token: str, packed: bytes) -> None:
        self._records.append((token, packed))
        self._num_bytes += len(packed)

    def is_full(self) -> bool:
        num_users = max(len(self._records), len(self.profiles))
        return num_users >= self._config.batch_users_max or self._num_bytes >= self._config.batch_bytes_max

    def take(self) -> tuple[_Records, _Profiles]:
        taken = self._records, self.profiles
        self._records, self.profiles, self._num_bytes = [], [], 0
        return taken
