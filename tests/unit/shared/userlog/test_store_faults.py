"""A store that restarts, is full, or is slow: what is lost, what is refused, and that all is well again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from shared.clock import SystemClock
from shared.errors import StoreUnavailableError
from shared.schema.api import Event
from shared.userlog import (
    AppendResult,
    BufferConfig,
    BufferedUserLog,
    EmbeddedStore,
    EmbeddedStoreConfig,
    RedisUserLog,
    StoreConfig,
    UserLoad,
    UserLogConfig,
    connect,
)
from shared.userlog.client import StoreClient
from tests.helpers.tcp_proxy import TcpProxy
from tests.helpers.waiting import until

MakeEvent = Callable[..., Event]

LATER = 2**40


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A server that a test may stop or fill."""
    with EmbeddedStore(tmp_path / "store", EmbeddedStoreConfig(die_with_parent=True, fsync="always")) as store:
        yield store


def port_of(server: EmbeddedStore) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


@asynccontextmanager
async def reached(proxy: TcpProxy, **limits: int) -> AsyncIterator[tuple[StoreClient, RedisUserLog]]:
    """Connect to a store through a proxy."""
    client = connect(StoreConfig.model_validate({"url": f"redis://127.0.0.1:{proxy.port}/0", "retries": 0, **limits}))
    try:
        yield client, RedisUserLog(client, UserLogConfig(timeout_ms=5_000))
    finally:
        await client.aclose()


async def test_a_restart_loses_nothing_and_needs_no_new_client(own_server: EmbeddedStore, event: MakeEvent) -> None:
    """Scripts and connections are gone with the old process; the same client goes on with the new one."""
    async with TcpProxy(port_of(own_server)) as proxy, reached(proxy) as (_, log):
        buffered = BufferedUserLog(log, BufferConfig(retry_interval_ms=10), SystemClock())
        assert await buffered.append([event("a", 1, item=1), event("b", 2, item=2)]) == AppendResult(appended=2)
        proxy.up = False
        await proxy.cut()
        own_server.stop()
        with pytest.raises(StoreUnavailableError):
            await buffered.read(1, LATER, 5)
        assert await buffered.append([event("b", 2, item=2), event("c", 3, item=3)]) == AppendResult(buffered=2)
        own_server.start()
        proxy.target_port, proxy.up = port_of(own_server), True
        await until(lambda: buffered.num_buffered == 0)
        assert (await buffered.read(1, LATER, 5)).item_keys.tolist() == [1, 2, 3]
        await buffered.aclose()


async def test_a_full_store_refuses_events_and_still_answers(own_server: EmbeddedStore, event: MakeEvent) -> None:
    async with TcpProxy(port_of(own_server)) as proxy, reached(proxy) as (client, log):
        buffered = BufferedUserLog(log, BufferConfig(events_max=2, retry_interval_ms=10), SystemClock())
        await buffered.append([event("a", 1, item=1)])
        await client.config_set("maxmemory", "1")
        assert await buffered.append([event("b", 2, item=2)]) == AppendResult(buffered=1)
        with pytest.raises(StoreUnavailableError, match="OutOfMemoryError"):
            await log.append([event("c", 3, item=3)])
        nothing = UserLoad(2, np.ones(1, np.int64), np.ones(1, np.float32), np.ones(1, np.int64), [1])
        with pytest.raises(StoreUnavailableError, match="OutOfMemoryError"):
            await log.load_many([nothing])
        with pytest.raises(StoreUnavailableError, match="no room for 2 more"):
            await buffered.append([event("c", 3), event("d", 4)])
        assert (await buffered.read(1, LATER, 5)).item_keys.tolist() == [1]
        assert await log.delete(1)  # making room must be possible
        await client.config_set("maxmemory", "0")
        await until(lambda: buffered.num_buffered == 0)
        assert (await buffered.read(1, LATER, 5)).item_keys.tolist() == [2]
        await buffered.aclose()


async def test_a_slow_store_holds_no_more_than_the_pool(server: EmbeddedStore, event: MakeEvent) -> None:
    """Readers beyond the pool wait for a connection and then fail; they open none, and the store is not flooded."""
    async with (
        TcpProxy(port_of(server), lambda: 0.1) as proxy,
        reached(proxy, connections_max=3, pool_wait_ms=20) as (_, log),
    ):
        results = await asyncio.gather(*(log.read(user, LATER, 5) for user in range(20)), return_exceptions=True)
        assert proxy.num_connections == 3
        refused = [result for result in results if isinstance(result, StoreUnavailableError)]
        assert len(refused) == 17
        assert all("No connection available" in str(error) for error in refused)
        proxy.reply_delay_s = lambda: 0.0
        assert all(
            len(history) == 0 for history in await asyncio.gather(*(log.read(user, LATER, 5) for user in range(3)))
        )
