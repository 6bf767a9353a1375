"""What one mesh, model, version or user has stored is out of reach of every other."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from services.sequence.histories import HistoryCache
from services.speculative.config import SpeculativeConfig
from services.speculative.store import EmbeddingStore
from shared.clock import ManualClock
from shared.hashing import store_token
from shared.schema.speculative import PrecomputedBatch
from shared.schema.stamp import Stamp
from shared.schema.user import UserHistory
from shared.userlog import RedisUserLog, StoreConfig, UserLogConfig, connect
from tests.helpers.fake_redis import FakeRedis

AWKWARD: list[int | str] = [
    7,
    "7:",
    "{7}",
    "7}:{7",
    "ns:spec:ranker:v1:{7",
    "*",
    "é",
    "e\u0301",
    "\u202e7",
    "\uff17",
    "7\n",
    "../7",
]
"""Ids that a careless key would mix up; the number and its own spelling are one user by rule."""


def store(client: FakeRedis, namespace: str = "mesh", model: str = "ranker", version: str = "v1") -> EmbeddingStore:
    config = SpeculativeConfig(namespace=namespace, model_namespace=model, width=2)
    return EmbeddingStore(client, config, version, ManualClock())


def batch(value: float) -> PrecomputedBatch:
    keys = np.array([1], np.int64)
    vectors = np.full((1, 2), value, np.float32)
    return PrecomputedBatch(Stamp("r", "v1", "foundation", "f-0", 0.1), keys, keys, vectors, 10)


async def read(place: EmbeddingStore, user: int | str) -> list[float]:
    return [float(record["vector"][0]) for record in await place.read(user, 20)]


async def test_embeddings_are_kept_apart_by_mesh_model_version_and_delta() -> None:
    client = FakeRedis()
    places = [
        store(client),
        store(client, namespace="other"),
        store(client, model="ads"),
        store(client, version="v2"),
        store(client, version="v1+3"),
    ]
    await places[0].write(7, batch(1.0))
    assert [await read(place, 7) for place in places] == [[1.0], [], [], [], []]
    assert len({place.key(7) for place in places[:4]}) == 4


async def test_embeddings_are_kept_apart_by_user() -> None:
    client = FakeRedis()
    place = store(client)
    for number, user in enumerate(AWKWARD):
        await place.write(user, batch(float(number)))
    assert [await read(place, user) for user in AWKWARD] == [[float(number)] for number in range(len(AWKWARD))]
    assert await read(place, "7") == [0.0]


def test_remembered_histories_are_kept_apart_by_user() -> None:
    cache = HistoryCache(100)
    for number, user in enumerate(AWKWARD):
        row = np.array([number], np.int64)
        cache.keep(user, UserHistory(row, np.ones(1, np.float32), row, 1))
    found = [cache.last_known(user, 1_000) for user in AWKWARD]
    assert [None if history is None else history.item_keys.tolist() for history in found] == [
        [number] for number in range(len(AWKWARD))
    ]


def test_logs_are_kept_apart_by_mesh_and_user() -> None:
    logs = [
        RedisUserLog(connect(StoreConfig(url="redis://127.0.0.1:1")), UserLogConfig(namespace=namespace))
        for namespace in ("mesh", "other")
    ]
    keys = {log._keys(store_token(user)) for log in logs for user in AWKWARD}
    assert len(keys) == 2 * len(AWKWARD)
    assert all(key.isascii() and key.isprintable() for group in keys for key in group)


@pytest.mark.parametrize("name", ["mesh:spec", "mesh}", "{x", "", "a b", "a\n", "*", "é"])
def test_a_namespace_cannot_reach_into_another(name: str) -> None:
    for cls in (SpeculativeConfig, UserLogConfig):
        with pytest.raises(ValidationError):
            cls(namespace=name)
    with pytest.raises(ValidationError):
        SpeculativeConfig(model_namespace=name)
