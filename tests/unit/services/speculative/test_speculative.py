from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from services.speculative.config import SpeculativeConfig
from services.speculative.hierarchy import resolve
from services.speculative.series import NamedStates
from services.speculative.service import SpeculativeService
from services.speculative.store import EmbeddingStore
from shared.clock import ManualClock
from shared.errors import DeadlineExceededError, InvalidRequestError, StoreUnavailableError, VersionMismatchError
from shared.log import JsonLogger
from shared.schema.features import FeatureBatch
from shared.schema.speculative import HitLevel, PrecomputedBatch, SpeculativeTask
from shared.schema.stamp import Stamp
from shared.weights.held import HeldVersions, OneVersion
from tests.helpers.fake_redis import FakeRedis
from tests.helpers.waiting import as_time_passes

WIDTH = 2
CLOCK = ManualClock()
NONE, USER, EXACT = HitLevel.NONE, HitLevel.USER_AGGREGATE, HitLevel.EXACT


def stamp(request_id: str = "r/1", version: str = "v1") -> Stamp:
    return Stamp(request_id, version, "preprocess", "preprocess-0", 0.1)


def features(keys: list[int], groups: list[int], request_id: str = "r/1", version: str = "v1") -> FeatureBatch:
    dense = np.zeros((len(keys), 0), np.float32)
    return FeatureBatch(
        stamp(request_id, version), np.array(keys, np.int64), np.array(groups, np.int64), {}, {}, dense, {}
    )


def batch(
    vectors: dict[int, list[float]], groups: dict[int, int], as_of_s: int = 100, **fields: Any
) -> PrecomputedBatch:
    keys = list(vectors)
    return PrecomputedBatch(
        stamp(**fields), np.array(keys, np.int64), np.array([groups.get(key, 0) for key in keys], np.int64),
        np.array([vectors[key] for key in keys], np.float32), as_of_s,
    )  # fmt: skip


def task(as_of_s: int = 100, **fields: Any) -> SpeculativeTask:
    values = {"request_id": "r/1", "version": "v1", "user": 1, "remaining_ms": 1_000.0, **fields}
    return SpeculativeTask(as_of_s=as_of_s, **values)


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def service(redis: FakeRedis) -> SpeculativeService:
    config = SpeculativeConfig(width=WIDTH, store_timeout_ms=10, fill_timeout_ms=10)
    store = EmbeddingStore(redis, config, "v1", CLOCK)
    return SpeculativeService(config, OneVersion("v1", store), CLOCK, "speculative-0", JsonLogger(stream=io.StringIO()))


def test_exact_pair_before_ad_group_before_none() -> None:
    vectors, levels = resolve(
        candidate_keys=np.array([7, 5, 9, 4, 6]),
        group_keys=np.array([1, 1, 2, 0, 1]),
        stored_keys=np.array([1, 2, 3, 5]),
        stored_groups=np.array([1, 1, 0, 1]),
        stored_vectors=np.array([[1, 0], [2, 0], [9, 9], [6, 3]], np.float32),
    )

    assert levels.tolist() == [USER, EXACT, NONE, NONE, USER]
    assert vectors.tolist() == [[3, 1], [6, 3], [0, 0], [0, 0], [3, 1]]


def test_nothing_stored_is_level_none_everywhere() -> None:
    empty = np.zeros(0, np.int64)
    vectors, levels = resolve(np.array([1, 2]), np.array([1, 1]), empty, empty, np.zeros((0, WIDTH), np.float32))

    assert levels.tolist() == [NONE, NONE]
    assert vectors.shape == (2, WIDTH)
    assert not vectors.any()


def test_no_candidates_are_no_embeddings() -> None:
    keys = np.array([1])
    vectors, levels = resolve(keys[:0], keys[:0], keys, keys, np.ones((1, WIDTH), np.float32))
    assert (vectors.shape, len(levels)) == ((0, WIDTH), 0)


async def test_what_was_filled_is_found(service: SpeculativeService) -> None:
    assert await service.fill(task(), batch({5: [1, 2], 8: [3, 4]}, {5: 9, 8: 9})) == 2

    found = await service.lookup(task(), features([5, 6, 7], [9, 9, 3]))

    assert found.levels.tolist() == [EXACT, USER, NONE]
    assert found.vectors.tolist() == [[1, 2], [2, 3], [0, 0]]
    assert found.stamp.request_id == "r/1"
    counters = service.status()["counters"]
    assert [counters[f"candidates.{name}"] for name in ("exact", "user", "none")] == [1, 1, 1]
    assert counters["stored"] == 2


async def test_aggregates_leave_out_what_was_made_for_later(service: SpeculativeService) -> None:
    await service.fill(task(), batch({5: [2, 2]}, {5: 9}, as_of_s=100))
    await service.fill(task(200), batch({6: [8, 8]}, {6: 9}, as_of_s=200))

    found = await service.lookup(task(150), features([7], [9]))

    assert found.vectors.tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("how", "counter"), [("down", "lookup_store_unavailable"), ("silent", "lookup_deadline_exceeded")]
)
async def test_a_store_out_of_reach_is_counted_and_gives_none(
    service: SpeculativeService, redis: FakeRedis, how: str, counter: str
) -> None:
    await service.fill(task(), batch({5: [1, 2]}, {}))
    setattr(redis, how, True)

    found = await as_time_passes(CLOCK, service.lookup(task(), features([5, 6], [0, 0])))

    assert found.levels.tolist() == [NONE, NONE]
    assert service.status()["counters"][counter] == 1


@pytest.mark.parametrize("how", ["down", "silent"])
async def test_a_fill_that_the_store_does_not_take_is_an_error(
    service: SpeculativeService, redis: FakeRedis, how: str
) -> None:
    setattr(redis, how, True)
    with pytest.raises(StoreUnavailableError):
        await as_time_passes(CLOCK, service.fill(task(), batch({5: [1, 2]}, {})))


async def test_embeddings_of_another_width_are_refused(service: SpeculativeService) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await service.fill(task(), batch({5: [1, 2, 3]}, {}))
    assert caught.value.context == {"field": "vectors", "limit": 2, "value": "[1, 3]"}


@pytest.mark.parametrize("foreign", [{"request_id": "r/2"}, {"version": "v2"}])
async def test_foreign_inputs_are_refused(service: SpeculativeService, foreign: dict[str, Any]) -> None:
    with pytest.raises(VersionMismatchError):
        await service.lookup(task(), features([1], [0], **foreign))
    with pytest.raises(VersionMismatchError):
        await service.fill(task(), batch({1: [1, 2]}, {}, **foreign))
    with pytest.raises(VersionMismatchError):
        await service.lookup(task(version="v2"), features([1], [0], version="v2"))


async def test_a_user_is_forgotten_by_every_held_version(redis: FakeRedis) -> None:
    series = NamedStates("v1", lambda name: EmbeddingStore(redis, SpeculativeConfig(width=WIDTH), name, CLOCK))
    versions: HeldVersions[EmbeddingStore] = HeldVersions(lambda base: series, ThreadPoolExecutor(1))
    versions.start(["v1", "v1+1"])
    service = SpeculativeService(
        SpeculativeConfig(width=WIDTH), versions, CLOCK, "speculative-0", JsonLogger(stream=io.StringIO())
    )
    await service.fill(task(), batch({5: [1, 2]}, {}))
    assert await service.forget(1)
    assert (await service.lookup(task(), features([5], [0]))).levels.tolist() == [NONE]
    assert not await service.forget(1)
    redis.down = True
    with pytest.raises(StoreUnavailableError):
        await service.forget(1)


async def test_an_expired_request_is_dropped(service: SpeculativeService, redis: FakeRedis) -> None:
    with pytest.raises(DeadlineExceededError):
        await service.lookup(task(remaining_ms=0.0), features([1], [0]))
    assert redis.num_commands == 0
