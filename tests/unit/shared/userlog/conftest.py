"""One embedded server a test process (it starts in 0.1 s); every test has a namespace of its own on it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shared.schema.api import Event
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, MemoryUserLog, StoreConfig, UserLog, connect
from shared.userlog.client import StoreClient
from shared.userlog.redis_log import RedisUserLog, UserLogConfig

MAX_EVENTS = 6
BLOCK_EVENTS = 3

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    folder: Path = tmp_path_factory.mktemp("store")
    with EmbeddedStore(folder, EmbeddedStoreConfig(die_with_parent=True, fsync="no")) as store:
        yield store


@pytest.fixture
def namespace() -> str:
    return f"test{next(_numbers)}"


@pytest.fixture
async def client(server: EmbeddedStore) -> AsyncIterator[StoreClient]:
    client = connect(StoreConfig(url=server.url))
    yield client
    await client.aclose()


@pytest.fixture
def redis_log(client: StoreClient, namespace: str) -> RedisUserLog:
    return RedisUserLog(
        client, UserLogConfig(namespace=namespace, max_events=MAX_EVENTS, block_events=BLOCK_EVENTS, timeout_ms=5_000)
    )


@pytest.fixture(params=["redis", "memory"])
def log(request: pytest.FixtureRequest) -> UserLog:
    """Both user logs: they must not differ."""
    if request.param == "memory":
        return MemoryUserLog(MAX_EVENTS)
    log: RedisUserLog = request.getfixturevalue("redis_log")
    return log


@pytest.fixture
def event() -> Callable[..., Event]:
    """Makes events with few words: ``event("a", 10)``."""

    def make(
        event_id: str,
        timestamp_s: int,
        user: int | str = 1,
        item: int | str = 7,
        weight: float = 1.0,
        source: str | None = None,
    ) -> Event:
        return Event(
            event_id=event_id, user_id=user, item_id=item, weight=weight, timestamp_s=timestamp_s, source=source
        )

    return make
