"""Events that come late go where they belong, a bounded number of blocks a step: others get their turn between."""

from __future__ import annotations

import random
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog import AppendResult, EmbeddedStore, MemoryUserLog, RedisUserLog, StoreConfig, UserLogConfig, connect
from shared.userlog.client import StoreClient
from tests.helpers.tcp_proxy import TcpProxy

MakeEvent = Callable[..., Event]

LATER = 2**40
NUM_EVENTS, BLOCK = 80, 4


def view(history: UserHistory) -> tuple[list[int], list[int], int]:
    return history.item_keys.tolist(), history.timestamps_s.tolist(), history.num_total


@pytest.mark.parametrize("blocks_max", [1, 2, 7, 100])
@pytest.mark.parametrize("keep", [NUM_EVENTS, 200])
async def test_they_are_sorted_in_whatever_the_bound(
    client: StoreClient, namespace: str, event: MakeEvent, blocks_max: int, keep: int
) -> None:
    config = UserLogConfig(
        namespace=namespace, max_events=keep, block_events=BLOCK, append_blocks_max=blocks_max, timeout_ms=5_000
    )
    log, model = RedisUserLog(client, config), MemoryUserLog(keep)
    rng = random.Random(blocks_max)
    for one in (log, model):
        await one.append([event(f"e{n}", 10 * n, item=n) for n in range(NUM_EVENTS)])
    for step in range(4):
        times = [rng.randrange(5, 10 * NUM_EVENTS + 50) for _ in range(30)]
        late = [event(f"{step}/{n}", time, item=1_000 * step + n) for n, time in enumerate(times)]
        results = [await one.append([*late, late[0]]) for one in (log, model)]
        assert sum((results[0].appended, results[0].expired)) == 30
        assert results[0].duplicates == results[1].duplicates == 1
        if keep > 2 * NUM_EVENTS:
            assert results[0] == results[1]
        assert view(await log.read(1, LATER, keep))[:2] == view(await model.read(1, LATER, keep))[:2]
        again = await log.append(late)
        assert (again.appended, again.duplicates + again.expired) == (0, 30)


async def test_a_step_rewrites_so_many_blocks_and_no_more(
    server: EmbeddedStore, namespace: str, event: MakeEvent
) -> None:
    port = urlsplit(server.url).port
    assert port is not None
    async with TcpProxy(port) as proxy:
        client = connect(StoreConfig(url=f"redis://127.0.0.1:{proxy.port}/0"))
        limits = UserLogConfig(namespace=namespace, block_events=BLOCK, append_blocks_max=3, timeout_ms=5_000)
        log = RedisUserLog(client, limits)
        await log.append([event(f"e{n}", 10 * n) for n in range(NUM_EVENTS)])
        for num_blocks, trips in ((1, 1), (3, 1), (4, 2), (7, 3), (15, 5)):
            late = [event(f"{num_blocks}/{n}/{k}", 10 * BLOCK * n + 15) for n in range(num_blocks) for k in range(2)]
            proxy.num_replies = 0
            assert await log.append(late) == AppendResult(appended=2 * num_blocks)
            assert proxy.num_replies == trips
            await log.delete(1)
            await log.append([event(f"e{n}", 10 * n) for n in range(NUM_EVENTS)])
        await client.aclose()
