"""The user log in a Redis-protocol store: append and read are one script each, one round trip each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field
from redis.exceptions import NoScriptError, RedisError

from shared.config import Config
from shared.hashing import EntityId, store_token
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog.api import AppendResult, UserLoad
from shared.userlog.client import StoreClient, guard
from shared.userlog.records import pack_events, pack_load, unpack_history
from shared.userlog.scripts import APPEND, READ, Script

_LAYOUT: Final = "log1"
"""Names the record layout in the key: another layout gets another key and never reads this one's bytes."""

_Records: TypeAlias = list[tuple[str, bytes]]
_Profiles: TypeAlias = list[tuple[str, dict[Any, Any]]]


class UserLogConfig(Config):
    """Limits of the user log.

    Args:
        namespace: First part of every key; two meshes on one store take two.
        max_events: Newest events kept a user. Event ids are remembered exactly as long as their events.
        slack_events: How far a log may outgrow ``max_events`` before it is cut (memory against rewriting).
        timeout_ms: How long one append or read may take, waiting for a connection included.
        load_timeout_ms: How long one round trip of a bulk load may take.
        batch_users_max: Users in one round trip of an append or a bulk load.
        batch_bytes_max: Bytes of events from which on a round trip takes no further user.
    """

    namespace: str = Field("rankmesh", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    max_events: int = Field(4_096, ge=1, le=1_000_000)
    slack_events: int = Field(512, ge=0, le=1_000_000)
    timeout_ms: int = Field(1_000, ge=1)
    load_timeout_ms: int = Field(10_000, ge=1)
    batch_users_max: int = Field(256, ge=1, le=10_000)
    batch_bytes_max: int = Field(1_048_576, ge=1_024)


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

    async def append(self, events: Sequence[Event]) -> AppendResult:
        """Add events of any users, in as many round trips as ``batch_users_max`` asks, mostly one.

        When it raises, some users' events may be written; sending all again is right.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        by_user: dict[str, list[Event]] = {}
        for event in events:
            by_user.setdefault(store_token(event.user_id), []).append(event)
        batch = _Batch(self._config)
        result = AppendResult()
        for token, own in by_user.items():
            packed, duplicates, expired = pack_events(own, self._config.max_events)
            result += AppendResult(duplicates=duplicates, expired=expired)
            batch.add_records(self._log_key(token), packed)
            if batch.is_full():
                result += await self._write(batch, self._config.timeout_ms)
        return result + await self._write(batch, self._config.timeout_ms)

    async def read(self, user: EntityId, before_s: int, limit: int) -> UserHistory:
        """Return the newest events of a user strictly before a time, and the profile, in one round trip.

        Args:
            user: Raw user id.
            before_s: Seconds since the epoch.
            limit: Events to return at most, 0 or more.

        Raises:
            ValueError: ``limit`` is negative.
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        if limit < 0:
            raise ValueError(f"limit must be 0 or more, is {limit}")
        token = store_token(user)
        keys = (self._log_key(token), self._profile_key(token))
        args = (before_s, limit, self._config.max_events)
        packed, num_total, profile = await guard(
            self._evaluate(READ, keys, args), self._config.timeout_ms, "read user log"
        )
        pairs = iter(part.decode() for part in profile)
        return unpack_history(packed, num_total, dict(zip(pairs, pairs, strict=True)))

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
                batch.add_records(self._log_key(token), packed)
            if load.profile:
                batch.profiles.append((self._profile_key(token), dict(load.profile)))
            if batch.is_full():
                result += await self._write(batch, self._config.load_timeout_ms)
        return result + await self._write(batch, self._config.load_timeout_ms)

    async def delete(self, user: EntityId) -> bool:
        """Forget a user, events and profile; return whether there was anything.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        token = store_token(user)
        keys = (self._log_key(token), self._profile_key(token))
        return bool(await guard(self._client.unlink(*keys), self._config.timeout_ms, "delete user"))

    async def check(self) -> None:
        """Raise unless the store answers.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        await guard(self._client.ping(), self._config.timeout_ms, "ping store")

    async def _write(self, batch: _Batch, timeout_ms: int) -> AppendResult:
        records, profiles = batch.take()
        if not records and not profiles:
            return AppendResult()
        replies = await guard(self._send(records, profiles), timeout_ms, "append to user log")
        return AppendResult(
            appended=sum(reply[0] for reply in replies),
            duplicates=sum(reply[1] for reply in replies),
            expired=sum(reply[2] for reply in replies),
        )

    async def _send(self, records: _Records, profiles: _Profiles) -> list[list[int]]:
        """Write one batch and return the replies of the append script; scripts that the server lost are sent again."""
        replies = await self._pipeline(records, profiles)
        lost = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lost:
            await self._client.script_load(APPEND.text)
            again = await self._pipeline([records[index] for index in lost], [])
            for index, reply in zip(lost, again, strict=True):
                replies[index] = reply
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies[: len(records)]

    async def _pipeline(self, records: _Records, profiles: _Profiles) -> list[Any]:
        limits = (self._config.max_events, self._config.slack_events)
        async with self._client.pipeline(transaction=False) as pipe:
            for key, packed in records:
                # As a command: the method of that name refuses in a cluster, where a script of one key is fine.
                pipe.execute_command("EVALSHA", APPEND.sha, 1, key, packed, *limits)
            for key, profile in profiles:
                pipe.hset(key, mapping=profile)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    async def _evaluate(self, script: Script, keys: tuple[str, ...], args: tuple[int, ...]) -> Any:
        try:
            return await self._client.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:  # first use, or the server restarted: EVAL also keeps the script
            return await self._client.eval(script.text, len(keys), *keys, *args)

    def _log_key(self, token: str) -> str:
        # Braces: all keys of a user lie in one cluster slot.
        return f"{self._config.namespace}:{{{token}}}:{_LAYOUT}"

    def _profile_key(self, token: str) -> str:
        return f"{self._config.namespace}:{{{token}}}:profile"


class _Batch:
    """What the next round trip writes."""

    def __init__(self, config: UserLogConfig) -> None:
        self._config = config
        self._num_bytes = 0
        self._records: _Records = []
        self.profiles: _Profiles = []

    def add_records(self, key: str, packed: bytes) -> None:
        self._records.append((key, packed))
        self._num_bytes += len(packed)

    def is_full(self) -> bool:
        num_users = max(len(self._records), len(self.profiles))
        return num_users >= self._config.batch_users_max or self._num_bytes >= self._config.batch_bytes_max

    def take(self) -> tuple[_Records, _Profiles]:
        taken = self._records, self.profiles
        self._records, self.profiles, self._num_bytes = [], [], 0
        return taken
