"""Outages and late answers: no answer ever reaches another caller, every failure is mapped."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pytest

from shared.errors import ConfigError, StoreUnavailableError
from shared.hashing import id_key
from shared.schema.api import Event
from shared.userlog import AppendResult, EmbeddedStore, HistoryQuery, MemoryUserLog, StoreConfig, UserLoad, connect
from shared.userlog.client import StoreClient, guard
from shared.userlog.redis_log import RedisUserLog, UserLogConfig
from shared.userlog.scripts import APPEND, LOAD, READ
from tests.helpers.tcp_proxy import TcpProxy

MakeEvent = Callable[..., Event]

LATER = 2**40


def port_of(server: EmbeddedStore) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def store_config(proxy: TcpProxy, **changes: int) -> StoreConfig:
    return StoreConfig.model_validate({"url": f"redis://127.0.0.1:{proxy.port}/0", "retries": 0, **changes})


def _history(
    user: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64], list[int | str]]:
    return np.full(3, user, np.int64), np.ones(3, np.float32), np.arange(3, dtype=np.int64) + 1, [1, 2, 3]


async def test_a_late_answer_is_a_store_error_and_harms_nobody(server: EmbeddedStore, namespace: str) -> None:
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=200))
        await log.append([Event(event_id="a", user_id=1, item_id=1, weight=1, timestamp_s=1)])
        await log.append([Event(event_id="b", user_id=2, item_id=2, weight=1, timestamp_s=1)])
        await log.read(1, LATER, 5)
        slow = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=20))
        proxy.reply_delay_s = lambda: 0.1
        with pytest.raises(
            StoreUnavailableError, match="read user log: the store did not answer within 20 ms"
        ) as caught:
            await slow.read(1, LATER, 5)
        assert caught.value.context == {"timeout_ms": 20}
        assert caught.value.retryable
        proxy.reply_delay_s = lambda: 0.0
        assert (await log.read(2, LATER, 5)).item_keys.tolist() == [2]
        await client.aclose()


async def test_an_outage_is_a_store_error_and_passes(server: EmbeddedStore, namespace: str, event: MakeEvent) -> None:
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
        await log.append([event("a", 1)])
        proxy.up = False
        await proxy.cut()
        for call in (log.append([event("b", 2)]), log.read(1, LATER, 5), log.delete(1), log.check()):
            with pytest.raises(StoreUnavailableError, match="ConnectionError"):
                await call
        with pytest.raises(StoreUnavailableError, match="ConnectionError"):
            await log.load_many([UserLoad(1, *_history(1), {})])
        proxy.up = True
        await log.check()
        assert await log.append([event("a", 1), event("b", 2)]) == AppendResult(appended=1, duplicates=1)
        await client.aclose()


async def test_a_broken_connection_is_replaced_within_the_call(
    server: EmbeddedStore, namespace: str, event: MakeEvent
) -> None:
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy, retries=1))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
        await log.append([event("a", 1)])
        await proxy.cut()
        assert (await log.read(1, LATER, 5)).num_total == 1
        await client.aclose()


async def test_nothing_listens(namespace: str) -> None:
    client = connect(StoreConfig(url="redis://:hunter2@127.0.0.1:1/0", retries=0))
    with pytest.raises(StoreUnavailableError, match="ping store: ConnectionError") as caught:
        await RedisUserLog(client, UserLogConfig(namespace=namespace)).check()
    assert "hunter2" not in str(caught.value)
    await client.aclose()


async def test_a_full_pool_makes_callers_wait_and_then_fail(server: EmbeddedStore, namespace: str) -> None:
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy, connections_max=1, pool_wait_ms=10))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
        await log.check()
        proxy.reply_delay_s = lambda: 0.05
        first = asyncio.create_task(log.check())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailableError, match="No connection available"):
            await log.check()
        await first
        await client.aclose()


async def test_scripts_that_the_server_lost_are_sent_again(
    client: StoreClient, redis_log: RedisUserLog, event: MakeEvent
) -> None:
    for script in (APPEND, LOAD, READ):
        assert await client.script_load(script.text) in (script.sha, script.sha.encode())
    await client.script_flush()
    events = [event("a", 1, user=user) for user in range(5)]
    assert await redis_log.append(events) == AppendResult(appended=5)
    await client.script_flush()
    assert (await redis_log.read(1, LATER, 5)).num_total == 1
    await client.script_flush()
    result = await redis_log.load_many([UserLoad(9, *_history(9), {"a": "b"}), UserLoad(8, *_history(8), {})])
    assert result == AppendResult(appended=6)
    assert (await redis_log.read(9, LATER, 5)).profile == {"a": "b"}


async def test_append_is_one_round_trip_for_many_users(server: EmbeddedStore, namespace: str, event: MakeEvent) -> None:
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, batch_users_max=50, timeout_ms=5_000))
        await log.append([event("a", 1)])
        await log.read(1, LATER, 5)
        proxy.num_replies = 0
        await log.append([event(f"e{n}", n, user=n % 50) for n in range(200)])
        assert proxy.num_replies == 1
        proxy.num_replies = 0
        await log.append([event(f"f{n}", n, user=n) for n in range(51)])
        assert proxy.num_replies == 2
        proxy.num_replies = 0
        await log.read(1, LATER, 5)
        assert proxy.num_replies == 1
        proxy.num_replies = 0
        histories = await log.read_many([HistoryQuery(user, 10) for user in range(50)], 5)
        assert proxy.num_replies == 1
        assert [len(history) for history in histories][:3] == [2, 3, 2]
        await client.aclose()


async def test_many_users_take_several_trips_so_that_others_get_a_turn(
    server: EmbeddedStore, namespace: str, event: MakeEvent
) -> None:
    """The store works off a whole pipeline before it answers anybody else."""
    async with TcpProxy(port_of(server)) as proxy:
        client = connect(store_config(proxy))
        log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
        await log.append([event("a", 1)])
        await log.read(1, LATER, 5)
        proxy.num_replies = 0
        await log.append([event(f"e{n}", n, user=n) for n in range(70)])
        assert proxy.num_replies == 3
        for limit, expected in ((5, 3), (200, 3), (2_048, 18)):  # at most 9,000 events and 32 users
            proxy.num_replies = 0
            assert len(await log.read_many([HistoryQuery(user, LATER) for user in range(70)], limit)) == 70
            assert proxy.num_replies == expected
        await client.aclose()


async def test_a_refusal_of_the_server_is_a_store_error(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent
) -> None:
    await client.sadd(f"{namespace}:{{i1}}:log2", "x")
    with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
        await redis_log.append([event("a", 1)])
    with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
        await redis_log.read(1, LATER, 5)
    await client.set(f"{namespace}:{{i2}}:profile", "x")
    with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
        await redis_log.load_many([UserLoad(2, *_history(2), {"a": "b"})])


async def test_a_damaged_log_is_not_decoded(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent
) -> None:
    await redis_log.append([event("a", 1)])
    key = f"{namespace}:{{i1}}:log2"
    raw: Any = client  # the client's annotations know text alone
    block = await raw.lindex(key, 1)
    for damaged in (block + b"x", block[:-1], block[:20], b""):
        await raw.lset(key, 1, damaged)
        with pytest.raises(StoreUnavailableError, match=f"user log is damaged: a block of {len(damaged)} bytes"):
            await redis_log.read(1, LATER, 5)
        with pytest.raises(StoreUnavailableError, match="user log is damaged"):
            await redis_log.append([event("b", 2)])


async def test_a_log_of_a_later_format_is_refused(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent
) -> None:
    await redis_log.append([event("a", 1)])
    raw: Any = client
    await raw.lset(f"{namespace}:{{i1}}:log2", 0, struct.pack("<BI", 3, 1))
    for call in (redis_log.read(1, LATER, 5), redis_log.append([event("b", 2)])):
        with pytest.raises(StoreUnavailableError, match="user log has format 3, this release reads 2"):
            await call


async def test_a_log_of_the_release_before_is_taken_over(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent
) -> None:
    old = f"{namespace}:{{i1}}:log1"
    records = struct.pack("<qqqf", 1, 10, 7, 4.5) + struct.pack("<qqqf", id_key("x"), 20, id_key("item"), 3.3)
    await client.set(old, records)
    history = await redis_log.read(1, LATER, 5)
    assert history.item_keys.tolist() == [7, id_key("item")]
    assert history.weights.tolist() == [4.5, float(np.float32(3.3))]
    assert history.timestamps_s.tolist() == [10, 20]
    assert not await client.exists(old)
    await client.set(old, records + struct.pack("<qqqf", 2, 30, 8, 1.0))  # a process of that release still runs
    assert await redis_log.append([event("1", 10), event("x", 20), event("2", 30)]) == AppendResult(duplicates=3)
    assert (await redis_log.read(1, LATER, 5)).item_keys.tolist() == [7, id_key("item"), 8]


async def test_a_log_expires_after_its_last_event(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    log = RedisUserLog(client, UserLogConfig(namespace=namespace, ttl_s=1_000, timeout_ms=5_000))
    await log.load_many([UserLoad(1, *_history(1), {"a": "b"})])
    keys = [f"{namespace}:{{i1}}:{kind}" for kind in ("log2", "profile")]
    assert [await client.ttl(key) for key in keys] == [1_000, 1_000]
    for key in keys:
        await client.expire(key, 5)
    await log.read(1, LATER, 5)
    assert [await client.ttl(key) for key in keys] == [5, 5]  # reading is no event
    await log.append([event("a", 1)])
    assert [await client.ttl(key) for key in keys] == [1_000, 1_000]


async def test_a_log_in_the_store_is_cut_by_whole_blocks(
    client: StoreClient, redis_log: RedisUserLog, namespace: str, event: MakeEvent
) -> None:
    lengths = []
    raw: Any = client
    for time in range(12):
        await redis_log.append([event(f"e{time}", time)])
        lengths.append(struct.unpack_from("<BI", await raw.lindex(f"{namespace}:{{i1}}:log2", 0))[1])
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 6]


@pytest.mark.parametrize("keep", [1, 5, 30, 64])
async def test_a_log_that_was_longer_is_cut_to_a_smaller_bound(
    client: StoreClient, namespace: str, event: MakeEvent, keep: int
) -> None:
    """Whoever lowers ``max_events`` must not be left with logs that take no event any more."""
    long = RedisUserLog(client, UserLogConfig(namespace=namespace, block_events=4, timeout_ms=5_000))
    await long.append([event(f"e{time}", time, item=time) for time in range(40)])
    short = RedisUserLog(client, UserLogConfig(namespace=namespace, block_events=4, max_events=keep, timeout_ms=5_000))
    model = MemoryUserLog(keep)
    for time in range(40):  # of one batch, what is beyond the bound would never have been in the log
        await model.append([event(f"e{time}", time, item=time)])
    for step in ([], [event("late", 38, item=99)], [event("e39", 39)], [event("new", 50, item=50)], [event("old", 1)]):
        results = [await log.append(step) for log in (short, model)]
        assert results[0] == results[1]
        for limit, before_s in ((3, 40), (100, 60), (100, 20)):
            one, other = await short.read(1, before_s, limit), await model.read(1, before_s, limit)
            assert one.item_keys.tolist() == other.item_keys.tolist()
            assert one.num_total == other.num_total


async def test_two_namespaces_share_a_store(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    one = RedisUserLog(client, UserLogConfig(namespace=f"{namespace}-a"))
    other = RedisUserLog(client, UserLogConfig(namespace=f"{namespace}-b"))
    await one.append([event("a", 1)])
    assert (await other.read(1, LATER, 5)).num_total == 0


async def test_load_of_one_user(redis_log: RedisUserLog) -> None:
    items, weights, times, ids = _history(4)
    assert await redis_log.load(4, items, weights, times, ids, {"a": "b"}) == AppendResult(appended=3)


async def test_a_foreign_timeout_of_the_caller_stays_the_callers(redis_log: RedisUserLog) -> None:
    """A deadline around the call ends it as a timeout of the caller, not as a failure of the store."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await guard(asyncio.sleep(5), 5_000, "sleep")


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(url="http://user:hunter2@host"),
        StoreConfig(url="redis://user:hunter2@host:port"),
        StoreConfig(topology="sentinel"),
    ],
)
def test_configuration_that_cannot_be_used(config: StoreConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(config)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.context)
