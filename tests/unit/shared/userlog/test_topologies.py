"""The same user log behind Redis Cluster and behind Sentinel, each a real server of one node."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from shared.clock import SystemClock
from shared.errors import StoreUnavailableError
from shared.schema.api import Event
from shared.userlog import AppendResult, EmbeddedStore, StoreConfig, UserLoad, connect
from shared.userlog.embedded import find_server
from shared.userlog.redis_log import RedisUserLog, UserLogConfig

MakeEvent = Callable[..., Event]

LATER = 2**40


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[redis.Redis]:
    """Run the server binary with its own arguments and yield a plain client of it."""
    port = free_port()
    command = [str(find_server()), *arguments, "--port", str(port), "--bind", "127.0.0.1"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, protocol=2)
    try:
        _wait_until(client.ping)
        yield client
    finally:
        client.close()
        child.kill()
        child.wait()


def _wait_until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    end_s = clock.monotonic_s() + 10
    while clock.monotonic_s() < end_s:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        clock.block_s(0.005)
    raise AssertionError("the server is not ready after 10 s")


@pytest.fixture
def cluster_url(tmp_path: Path) -> Iterator[str]:
    with process(tmp_path, "--save", "", "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as admin:
        run: Callable[..., Any] = admin.execute_command
        run("CLUSTER ADDSLOTSRANGE", 0, 16_383)
        _wait_until(lambda: run("CLUSTER INFO")["cluster_state"] == "ok")
        yield f"redis://127.0.0.1:{admin.connection_pool.connection_kwargs['port']}/0"


@pytest.fixture
def sentinel_address(server: EmbeddedStore, tmp_path: Path) -> Iterator[str]:
    port = server.url.rpartition(":")[2].partition("/")[0]
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor primary 127.0.0.1 {port} 1\n")
    with process(tmp_path, str(config), "--sentinel") as admin:
        yield f"127.0.0.1:{admin.connection_pool.connection_kwargs['port']}"


async def check_all_commands(config: StoreConfig, namespace: str, event: MakeEvent) -> None:
    client = connect(config)
    log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=10_000))
    try:
        await log.check()
        users = range(40)  # in a cluster: of many slots
        assert await log.append([event("a", 1, user=user, item=user) for user in users]) == AppendResult(appended=40)
        loads = [UserLoad(u, np.array([7]), np.ones(1, np.float32), np.array([2]), ["b"], {"u": str(u)}) for u in users]
        assert await log.load_many(loads) == AppendResult(appended=40)
        for user in users:
            history = await log.read(user, LATER, 10)
            assert history.item_keys.tolist() == [user, 7]
            assert history.profile == {"u": str(user)}
        assert await log.delete(1)
        assert (await log.read(1, LATER, 10)).num_total == 0
    finally:
        await client.aclose()


@pytest.mark.slow  # a cluster takes 2 s before it accepts writes
async def test_cluster(cluster_url: str, namespace: str, event: MakeEvent) -> None:
    await check_all_commands(StoreConfig(url=cluster_url, topology="cluster"), namespace, event)


async def test_sentinel(sentinel_address: str, namespace: str, event: MakeEvent) -> None:
    config = StoreConfig(topology="sentinel", sentinels=(sentinel_address,), sentinel_service="primary")
    await check_all_commands(config, namespace, event)


@pytest.mark.parametrize(
    "config",
    [
        StoreConfig(url="redis://127.0.0.1:1/0", topology="cluster", retries=0),
        StoreConfig(topology="sentinel", sentinels=("127.0.0.1:1",), retries=0),
    ],
    ids=["cluster", "sentinel"],
)
async def test_none_to_be_found(config: StoreConfig, namespace: str) -> None:
    client = connect(config)
    log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
    with pytest.raises(StoreUnavailableError, match=r"annot be connected|No master found"):
        await log.read(1, LATER, 10)
    with pytest.raises(StoreUnavailableError, match=r"annot be connected|No master found"):
        await log.check()
    await client.aclose()
