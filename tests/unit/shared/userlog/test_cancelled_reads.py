"""Cancelled reads behind a slow store: no answer ever belongs to another caller, no connection is lost from the pool.

The bug that redis-py once had (issues 2624, 2665): a cancelled command left its reply to the next caller.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from urllib.parse import urlsplit

import numpy as np
import pytest

from shared.schema.user import UserHistory
from shared.userlog import EmbeddedStore, HistoryQuery, RedisUserLog, StoreConfig, UserLoad, UserLogConfig, connect
from tests.helpers.tcp_proxy import TcpProxy

NUM_USERS, NUM_CONNECTIONS = 40, 6
LATER = 2**40


def load_of(user: int) -> UserLoad:
    """Return a history of which every part names its user."""
    num = 1 + user % 9
    return UserLoad(
        user=user,
        item_keys=np.full(num, 1_000 + user, np.int64),
        weights=np.full(num, user / 2, np.float32),
        timestamps_s=np.full(num, 50_000 + user, np.int64),
        event_ids=np.arange(num),
        profile={"user": str(user)},
    )


def check(user: int, history: UserHistory) -> None:
    expected = load_of(user)
    assert history.item_keys.tolist() == expected.item_keys.tolist()
    assert history.weights.tolist() == expected.weights.tolist()
    assert history.timestamps_s.tolist() == expected.timestamps_s.tolist()
    assert history.profile == {"user": str(user)}


class Readers:
    """Reads single and many histories through a slow proxy and cancels as many as it is told to.

    Args:
        log: The log behind the proxy.
        width: Reads under way at once.
        seed: Of users, moments and delays.
    """

    def __init__(self, log: RedisUserLog, width: int, seed: int) -> None:
        self._log = log
        self._width = width
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def read(self, users: list[int]) -> None:
        try:
            if len(users) == 1:
                histories = [await self._log.read(users[0], LATER, 50)]
            else:
                histories = await self._log.read_many([HistoryQuery(user, LATER) for user in users], 50)
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
            raise
        for user, history in zip(users, histories, strict=True):
            check(user, history)
        self.outcomes["right"] += 1

    async def cancel(self, num_cancels: int) -> None:
        """Keep ``width`` reads under way; cancel most of them at a random moment, until so many were cancelled."""
        loop, rng = asyncio.get_running_loop(), self._random
        while self.outcomes["cancelled"] < num_cancels:
            tasks = []
            for number in range(self._width):
                users = [rng.randrange(NUM_USERS) for _ in range(rng.choice((1, 1, 5)))]
                tasks.append(asyncio.create_task(self.read(users)))
                if number % 6:
                    loop.call_later(rng.random() * 0.012, tasks[-1].cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [result for result in results if isinstance(result, Exception)]
            assert not wrong


async def cancel_many(server: EmbeddedStore, namespace: str, num_cancels: int, width: int, num_lost: int) -> None:
    """Cancel reads, ``width`` at once, of which at least ``num_lost`` must be waiting for an answer."""
    rng = random.Random(5)
    port = urlsplit(server.url).port
    assert port is not None
    async with TcpProxy(port, lambda: rng.random() * 0.002) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        # Long waits: on a busy machine no read may fail for another reason than that it was cancelled.
        config = StoreConfig(
            url=url,
            retries=0,
            connections_max=NUM_CONNECTIONS,
            pool_wait_ms=20_000,
            connect_timeout_ms=20_000,
            io_timeout_ms=20_000,
        )
        client = connect(config)
        # Short blocks and trips: half of the histories are read in several, and cancelled between two as well.
        limits = UserLogConfig(namespace=namespace, timeout_ms=20_000, block_events=2, read_events_max=4)
        log = RedisUserLog(client, limits)
        await log.load_many([load_of(user) for user in range(NUM_USERS)])
        readers = Readers(log, width, seed=7)
        await readers.cancel(num_cancels)
        assert readers.outcomes["right"] >= num_cancels // 10, readers.outcomes  # else the test shows nothing
        assert proxy.num_connections >= NUM_CONNECTIONS + num_lost  # each of these cost its connection
        # Nothing was lost from the pool: more readers than connections still all get through, and get their own.
        proxy.reply_delay_s = lambda: 0.0
        await asyncio.gather(*(readers.read([user]) for user in range(NUM_USERS)))
        assert proxy.num_open <= NUM_CONNECTIONS
        await client.aclose()


async def test_500_cancelled_reads(server: EmbeddedStore, namespace: str) -> None:
    await cancel_many(server, namespace, 500, width=48, num_lost=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_10_000_cancelled_reads(server: EmbeddedStore, namespace: str) -> None:
    """More readers mostly wait for a connection; of these about half are cancelled while an answer is on its way."""
    await cancel_many(server, namespace, 10_000, width=10, num_lost=3_000)
