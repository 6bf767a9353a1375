"""Hashes of a Redis-protocol store in a dictionary, with switches for an outage and for silence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from redis.exceptions import ConnectionError as RedisConnectionError


class FakeRedis:
    """The hash commands that the speculative store uses, bytes in and out.

    Attributes:
        down: Every command fails, as when nothing listens.
        silent: Every command waits for ever, as behind a dead link.
        num_commands: Round trips that were made.
        expiries: Key to the time to live it was last given, seconds.
    """

    def __init__(self) -> None:
        self.hashes: dict[str, dict[bytes, bytes]] = {}
        self.expiries: dict[str, int] = {}
        self.down = False
        self.silent = False
        self.num_commands = 0

    async def hvals(self, name: str) -> list[bytes]:
        await self._trip()
        return list(self.hashes.get(name, {}).values())

    async def hset(self, name: str, *, mapping: Mapping[bytes, bytes]) -> int:
        await self._trip()
        return self._hset(name, mapping)

    async def hdel(self, name: str, *keys: bytes) -> int:
        await self._trip()
        held = self.hashes.get(name, {})
        return sum(held.pop(key, None) is not None for key in keys)

    def pipeline(self, transaction: bool = True) -> FakePipeline:
        return FakePipeline(self)

    def _hset(self, name: str, mapping: Mapping[bytes, bytes]) -> int:
        held = self.hashes.setdefault(name, {})
        num_new = len(mapping.keys() - held.keys())
        held.update(mapping)
        return num_new

    async def _trip(self) -> None:
        self.num_commands += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.down:
            raise RedisConnectionError("nothing listens")


class FakePipeline:
    """A transaction: all commands in one round trip."""

    def __init__(self, store: FakeRedis) -> None:
        self._store = store
        self._commands: list[tuple[Any, ...]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def hset(self, name: str, *, mapping: Mapping[bytes, bytes]) -> None:
        self._commands.append(("hset", name, mapping))

    def expire(self, name: str, time: int) -> None:
        self._commands.append(("expire", name, time))

    def hlen(self, name: str) -> None:
        self._commands.append(("hlen", name))

    async def execute(self) -> list[int]:
        await self._store._trip()
        results: list[int] = []
        for command, name, *rest in self._commands:
            if command == "hset":
                results.append(self._store._hset(name, rest[0]))
            elif command == "expire":
                self._store.expiries[name] = rest[0]
                results.append(1)
            else:
                results.append(len(self._store.hashes.get(name, {})))
        return results
