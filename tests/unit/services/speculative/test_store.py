from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.speculative.config import SpeculativeConfig
from services.speculative.store import EmbeddingStore, record_type
from shared.clock import ManualClock
from shared.errors import StoreUnavailableError
from shared.schema.speculative import PrecomputedBatch
from shared.schema.stamp import Stamp
from tests.helpers.fake_redis import FakeRedis

WIDTH = 3


class Rig:
    """A store over a fake server."""

    def __init__(self, version: str = "v1", redis: FakeRedis | None = None, **config: Any) -> None:
        self.clock = ManualClock()
        self.redis = redis or FakeRedis()
        self.config = SpeculativeConfig(width=WIDTH, ttl_s=60, **config)
        self.store = EmbeddingStore(self.redis, self.config, version, self.clock)

    async def keys(self, user: int | str = 1, as_of_s: int = 100) -> list[int]:
        keys: list[int] = (await self.store.read(user, as_of_s))["key"].tolist()
        return keys


def batch(*keys: int, as_of_s: int = 100, value: float = 0.25) -> PrecomputedBatch:
    vectors = np.full((len(keys), WIDTH), value, np.float32)
    stamp = Stamp("r/1", "v1", "foundation", "foundation-0", 1.0)
    return PrecomputedBatch(stamp, np.array(keys, np.int64), np.array(keys, np.int64) % 2, vectors, as_of_s)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_what_is_written_is_read_back_by_ascending_key(dtype: str) -> None:
    rig = Rig(vector_dtype=dtype)

    assert await rig.store.write("üser\n", batch(-9, 5, 2**62)) == 3
    records = await rig.store.read("üser\n", 100)

    assert records["key"].tolist() == [-9, 5, 2**62]
    assert records["group"].tolist() == [1, 1, 0]
    np.testing.assert_array_equal(records["vector"], np.full((3, WIDTH), 0.25, dtype))
    assert records["as_of_s"].tolist() == [100] * 3


async def test_reading_is_one_round_trip() -> None:
    rig = Rig()
    await rig.store.write(1, batch(*range(100)))
    before = rig.redis.num_commands

    await rig.store.read(1, 100)

    assert rig.redis.num_commands == before + 1


@pytest.mark.parametrize(("as_of_s", "keys"), [(99, []), (100, [1]), (101, [1])])
async def test_an_embedding_is_read_only_by_requests_at_or_after_its_time(as_of_s: int, keys: list[int]) -> None:
    rig = Rig()
    await rig.store.write(1, batch(1))
    assert await rig.keys(as_of_s=as_of_s) == keys


async def test_versions_users_and_meshes_never_see_one_another() -> None:
    redis = FakeRedis()
    rig = Rig(redis=redis)
    await rig.store.write(1, batch(1))

    for other in (Rig("v2", redis), Rig(redis=redis, namespace="other"), Rig(redis=redis, model_namespace="other")):
        assert await other.keys() == []
    assert await rig.keys(user=2) == []
    assert await rig.keys(user="1") == [1], "digits and number are one user"


async def test_an_embedding_is_not_read_past_its_time_to_live() -> None:
    rig = Rig()
    await rig.store.write(1, batch(1))
    await rig.clock.advance(30)
    await rig.store.write(1, batch(2))
    assert set(rig.redis.expiries.values()) == {60}, "the server forgets users who do not come back"

    await rig.clock.advance(29)
    assert await rig.keys() == [1, 2]
    await rig.clock.advance(1)
    assert await rig.keys() == [2], "each by its own age, though the hash lives on"


async def test_a_user_who_was_forgotten_has_none_of_any_version_and_gets_new_ones_after_the_margin() -> None:
    rig = Rig(forget_margin_s=5)
    other = Rig("v2", rig.redis, forget_margin_s=5)
    for one in (rig, other):
        await one.store.write(1, batch(1))
        await one.store.write(2, batch(2))

    assert await rig.store.forget("1")

    assert not await rig.store.forget(1)
    assert await rig.keys() == await other.keys() == []
    assert await rig.keys(2) == await other.keys(2) == [2]
    assert rig.store.key(1) not in rig.redis.values
    assert rig.redis.expiries[rig.store.mark_key(1)] == 65, "as long as an embedding of another version may live"
    await rig.clock.advance(5)
    assert await rig.store.write(1, batch(3)) == 0, "what was begun before may have read what was deleted"
    await rig.clock.advance(1)
    assert await rig.store.write(1, batch(4)) == 1
    assert await rig.keys() == [4]
    await other.clock.advance(6)
    assert await other.keys() == [], "a roll-back does not bring it again"


async def test_a_fill_that_overtakes_the_mark_is_not_read() -> None:
    rig = Rig(forget_margin_s=5)
    await rig.store.forget(1)
    mark = rig.redis.values.pop(rig.store.mark_key(1))
    await rig.clock.advance(1)
    assert await rig.store.write(1, batch(1)) == 1
    rig.redis.values[rig.store.mark_key(1)] = mark
    await rig.clock.advance(10)
    assert await rig.keys() == []


@pytest.mark.parametrize("count", [3, 4, 5])
async def test_a_user_keeps_a_bounded_number_the_oldest_go_first(count: int) -> None:
    rig = Rig(pairs_per_user_max=4)
    for key in range(count):
        await rig.store.write(1, batch(key, as_of_s=key))

    assert await rig.keys() == list(range(count))[-4:]


async def test_one_batch_over_the_bound_is_cut() -> None:
    rig = Rig(pairs_per_user_max=4)
    assert await rig.store.write(1, batch(*range(6))) == 4
    assert len(await rig.keys()) == 4


async def test_writing_the_same_batch_again_or_at_once_changes_nothing() -> None:
    rig = Rig()
    await rig.store.write(1, batch(1, 2))
    before = dict(rig.redis.values)

    await asyncio.gather(*(rig.store.write(1, batch(1, 2)) for _ in range(5)))

    assert rig.redis.values == before


async def test_vectors_that_are_not_finite_are_neither_written_nor_read() -> None:
    rig = Rig(vector_dtype="float16")
    bad = batch(1, 2, 3)
    bad.vectors[0, 0], bad.vectors[1, 0] = np.nan, 1e6

    assert await rig.store.write(1, bad) == 1
    assert await rig.keys() == [3]
    record = np.zeros(1, record_type(WIDTH, "float16"))
    record["key"], record["written_s"], record["vector"] = 9, int(rig.clock.now_s()), np.inf
    rig.redis.values[rig.store.key(1)][b"9"] = record.tobytes()
    assert await rig.keys() == [3]


async def test_records_of_another_layout_are_not_read() -> None:
    rig = Rig()
    await rig.store.write(1, batch(1))
    rig.redis.values[rig.store.key(1)][b"2"] = b"short"

    assert await rig.keys() == [1]


async def test_a_store_out_of_reach_says_so() -> None:
    rig = Rig()
    rig.redis.down = True
    with pytest.raises(StoreUnavailableError):
        await rig.store.read(1, 100)
    with pytest.raises(StoreUnavailableError):
        await rig.store.write(1, batch(1))


async def test_an_empty_batch_is_no_round_trip() -> None:
    rig = Rig()
    assert await rig.store.write(1, batch()) == 0
    assert rig.redis.num_commands == 0
