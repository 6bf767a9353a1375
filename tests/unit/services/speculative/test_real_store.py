"""The speculative store over a real Valkey server: the commands mean there what the fake says they mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from services.speculative.config import SpeculativeConfig
from services.speculative.store import EmbeddingStore
from shared.clock import SystemClock
from shared.errors import StoreUnavailableError
from shared.schema.speculative import PrecomputedBatch
from shared.schema.stamp import Stamp
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, StoreConfig, connect

WIDTH = 16
CONFIG = SpeculativeConfig(width=WIDTH, pairs_per_user_max=50)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = EmbeddedStoreConfig(die_with_parent=True, fsync="no")
    with EmbeddedStore(tmp_path_factory.mktemp("store"), config) as server:
        yield server.url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    client: Any = connect(StoreConfig(url=url))
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def store(client: Any) -> EmbeddingStore:
    return EmbeddingStore(client, CONFIG, "v1", SystemClock())


def batch(keys: range, as_of_s: int = 100) -> PrecomputedBatch:
    numbers = np.array(keys, np.int64)
    vectors = np.repeat((numbers[:, None] / 7).astype(np.float32), WIDTH, axis=1)
    return PrecomputedBatch(Stamp("r/1", "v1", "foundation", "f-0", 1.0), numbers, numbers % 3, vectors, as_of_s)


@pytest.mark.parametrize("user", [7, "7", "ünï✨ user\n\x00", "x" * 256])
async def test_what_is_written_is_read_back_bit_for_bit(store: EmbeddingStore, user: int | str) -> None:
    await store.write(user, batch(range(-3, 40)))

    records = await store.read(user, 100)

    assert records["key"].tolist() == list(range(-3, 40))
    np.testing.assert_array_equal(records["vector"], batch(range(-3, 40)).vectors)
    assert len(await store.read("someone else", 100)) == 0


async def test_the_bound_and_the_time_to_live_hold_on_the_server(store: EmbeddingStore, client: Any) -> None:
    for start in range(0, 100, 20):
        await store.write(1, batch(range(start, start + 20), as_of_s=start))

    assert await client.hlen(store.key(1)) == 50
    assert (await store.read(1, 100))["key"].tolist() == list(range(50, 100))
    assert 0 < await client.ttl(store.key(1)) <= CONFIG.ttl_s


async def test_fills_at_once_end_within_the_bound_and_whole(store: EmbeddingStore, client: Any) -> None:
    await asyncio.gather(*(store.write(1, batch(range(start, start + 30))) for start in (0, 10, 20, 30, 40, 50)))

    records = await store.read(1, 100)

    assert 0 < await client.hlen(store.key(1)) <= 50
    np.testing.assert_array_equal(records["vector"][:, 0], (records["key"] / 7).astype(np.float32))


async def test_a_user_is_forgotten(store: EmbeddingStore, client: Any) -> None:
    await store.write(1, batch(range(3)))
    assert await store.forget(1)
    assert not await store.forget(1)
    assert len(await store.read(1, 100)) == 0
    assert await store.write(1, batch(range(3))) == 0
    assert 0 < await client.ttl(store.mark_key(1)) <= CONFIG.ttl_s + CONFIG.forget_margin_s


async def test_nobody_listening_is_a_store_error() -> None:
    client: Any = connect(StoreConfig(url="redis://127.0.0.1:1/0"))
    with pytest.raises(StoreUnavailableError):
        await EmbeddingStore(client, CONFIG, "v1", SystemClock()).read(1, 100)
    await client.aclose()
