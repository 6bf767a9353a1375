"""Explored answers beside the users' logs, bounded, until outcomes are joined to them.

Of each user a list of the newest ones, which lies with the user's other keys and goes with them; and one sorted set of
the users that have any, by the time of the newest, from which the longest silent ones are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import Field

from shared.config import Config
from shared.hashing import EntityId, store_token
from shared.schema.explored import ExploredAnswer
from shared.userlog.client import guard


class ExploredConfig(Config):
    """Limits of what is kept of explored answers.

    Args:
        users_max: Users with any; the one whose newest is oldest goes first.
        user_answers_max: Answers a user; the oldest go first.
        ttl_s: Time after which a user's are dropped, seconds; outcomes that come later find nothing.
        timeout_ms: Longest wait for the store, milliseconds.
        read_users_max: Users that are read in one round trip.
    """

    users_max: int = Field(20_000, ge=1, le=10_000_000)
    user_answers_max: int = Field(16, ge=1, le=10_000)
    ttl_s: int = Field(90 * 86_400, ge=1, le=2**31)
    timeout_ms: int = Field(1_000, ge=1)
    read_users_max: int = Field(256, ge=1, le=10_000)


class ExploredLog(Protocol):
    """Explored answers by user; every method raises ``StoreUnavailableError`` when the store cannot be reached."""

    async def add(self, answer: ExploredAnswer) -> None:
        """Keep an answer."""
        ...

    async def read(self, since_s: int) -> list[bytes]:
        """Return the encoded answers of the users who had one from a time on, oldest user first."""
        ...

    async def forget(self, user: EntityId) -> bool:
        """Drop a user's; return whether there were any."""
        ...


class RedisExploredLog:
    """The real one.

    Args:
        client: From ``client.connect``; answers must be bytes.
        namespace: First part of the keys, that of the user log.
        config: Limits.
    """

    def __init__(self, client: Any, namespace: str, config: ExploredConfig) -> None:
        # Redis and Redis Cluster have the same methods, under types that have nothing in common.
        self._client = client
        self._namespace = namespace
        self._config = config

    async def add(self, answer: ExploredAnswer) -> None:
        """Keep an answer.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        await guard(self._add(answer), self._config.timeout_ms, "keep explored answer")

    async def read(self, since_s: int) -> list[bytes]:
        """Return the encoded answers of the users who had one from a time on.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        config = self._config
        listing = self._client.zrangebyscore(self._index, since_s, "+inf")
        tokens: list[bytes] = await guard(listing, config.timeout_ms, "list explored answers")
        found: list[bytes] = []
        for start in range(0, len(tokens), config.read_users_max):
            some = [token.decode() for token in tokens[start : start + config.read_users_max]]
            for answers in await guard(self._read(some), config.timeout_ms, "read explored answers"):
                found += answers
        return found

    async def forget(self, user: EntityId) -> bool:
        """Drop a user's answers.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        return bool(await guard(self._forget(store_token(user)), self._config.timeout_ms, "forget explored answers"))

    async def _add(self, answer: ExploredAnswer) -> None:
        token, config = store_token(answer.user), self._config
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(self._key(token), answer.encode())
            pipe.ltrim(self._key(token), 0, config.user_answers_max - 1)
            pipe.expire(self._key(token), config.ttl_s)
            pipe.zadd(self._index, {token: answer.answered_s})
            pipe.zcard(self._index)
            num_users = (await pipe.execute())[-1]
        if num_users > config.users_max:
            await self._drop(num_users - config.users_max)

    async def _drop(self, num_users: int) -> None:
        """Drop the users whose newest answers are oldest, and their answers, which nobody would find any more."""
        dropped: list[tuple[bytes, float]] = await self._client.zpopmin(self._index, num_users)
        async with self._client.pipeline(transaction=False) as pipe:
            for token, _ in dropped:
                pipe.unlink(self._key(token.decode()))
            await pipe.execute()

    async def _read(self, tokens: Sequence[str]) -> list[list[bytes]]:
        async with self._client.pipeline(transaction=False) as pipe:
            for token in tokens:
                pipe.lrange(self._key(token), 0, self._config.user_answers_max - 1)
            found: list[list[bytes]] = await pipe.execute()
        return found

    async def _forget(self, token: str) -> int:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.unlink(self._key(token))
            pipe.zrem(self._index, token)
            return sum(await pipe.execute())

    @property
    def _index(self) -> str:
        return f"{self._namespace}:explored"

    def _key(self, token: str) -> str:
        return f"{self._namespace}:{{{token}}}:explored"  # braces: in the cluster slot of the user's log


class MemoryExploredLog:
    """The same in dictionaries, for tests and simulation.

    Args:
        config: Limits.
    """

    def __init__(self, config: ExploredConfig | None = None) -> None:
        self._config = config or ExploredConfig()
        self._answers: dict[str, list[bytes]] = {}
        self._newest: dict[str, int] = {}

    async def add(self, answer: ExploredAnswer) -> None:
        """Keep an answer."""
        token = store_token(answer.user)
        self._answers[token] = [answer.encode(), *self._answers.get(token, [])][: self._config.user_answers_max]
        self._newest[token] = answer.answered_s
        while len(self._newest) > self._config.users_max:
            oldest = min(self._newest, key=lambda one: self._newest[one])
            del self._newest[oldest], self._answers[oldest]

    async def read(self, since_s: int) -> list[bytes]:
        """Return the encoded answers of the users who had one from a time on."""
        users = sorted(self._newest, key=lambda token: (self._newest[token], token))
        return [each for token in users if self._newest[token] >= since_s for each in self._answers[token]]

    async def forget(self, user: EntityId) -> bool:
        """Drop a user's answers."""
        self._newest.pop(store_token(user), None)
        return self._answers.pop(store_token(user), None) is not None
