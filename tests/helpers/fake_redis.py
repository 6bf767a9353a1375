"""Hashes of a Redis-protocol store in a dictionary, with switches for an outage and for silence."""

from __future__ import annotations

import asyncio

from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.simulation.stores import SimulatedHashes


class FakeRedis(SimulatedHashes):
    """The simulated hash commands in any event loop, bytes in and out.

    Attributes:
        down: Every command fails, as when nothing listens.
        silent: Every command waits for ever, as behind a dead link.
        num_commands: Round trips that were made.
    """

    def __init__(self) -> None:
        super().__init__(self._make_trip)
        self.down = False
        self.silent = False
        self.num_commands = 0

    async def _make_trip(self) -> None:
        self.num_commands += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.down:
            raise RedisConnectionError("nothing listens")
