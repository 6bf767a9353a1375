"""Explored answers in the store: both logs alike, their bounds, deletion, and bytes that are no answer."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest

from shared.errors import StoreUnavailableError
from shared.hashing import EntityId
from shared.schema.explored import ExploredAnswer
from shared.userlog import StoreConfig, connect
from shared.userlog.client import StoreClient
from shared.userlog.explored import ExploredConfig, ExploredLog, MemoryExploredLog, RedisExploredLog

LIMITS = ExploredConfig(users_max=3, user_answers_max=2, read_users_max=2, timeout_ms=5_000)


def answer(user: EntityId, answered_s: int = 100) -> ExploredAnswer:
    return ExploredAnswer(
        user=user,
        version="v+1",
        surface="feed",
        as_of_s=answered_s - 1,
        answered_s=answered_s,
        depths=(0, 1, 2),
        item_keys=np.array([5, -7], np.int64),
        exits=np.arange(12, dtype=np.float32).reshape(2, 3, 2),
        signals=np.array([0.5, 1.5], np.float32),
    )


@pytest.fixture(params=["redis", "memory"])
def explored(request: pytest.FixtureRequest, namespace: str) -> ExploredLog:
    if request.param == "memory":
        return MemoryExploredLog(LIMITS)
    client: StoreClient = request.getfixturevalue("client")
    return RedisExploredLog(client, namespace, LIMITS)


async def _read(log: ExploredLog, since_s: int = 0) -> list[tuple[EntityId, int]]:
    found = [ExploredAnswer.decode(data, 2) for data in await log.read(since_s)]
    return [(one.user, one.answered_s) for one in found]


async def test_answers_come_back_as_they_were(explored: ExploredLog) -> None:
    wanted = answer("é")
    await explored.add(wanted)
    (data,) = await explored.read(0)
    found = ExploredAnswer.decode(data, 2)
    for field in fields(ExploredAnswer):
        np.testing.assert_equal(getattr(found, field.name), getattr(wanted, field.name))


async def test_users_and_answers_are_bounded_and_the_oldest_go(explored: ExploredLog) -> None:
    for time_s in (10, 20, 30):
        await explored.add(answer(1, time_s))
    assert await _read(explored) == [(1, 30), (1, 20)]
    for user in (2, 3, 4):
        await explored.add(answer(user, 100 + user))
    assert await _read(explored) == [(2, 102), (3, 103), (4, 104)]
    assert await _read(explored, 103) == [(3, 103), (4, 104)]


async def test_the_answers_of_users_who_are_dropped_take_no_more_room(client: StoreClient, namespace: str) -> None:
    log = RedisExploredLog(client, namespace, LIMITS)
    for user in range(20):
        await log.add(answer(user, 100 + user))
    kept = [key async for key in client.scan_iter(f"{namespace}:*")]
    assert len(kept) == LIMITS.users_max + 1  # and the index
    assert await _read(log) == [(17, 117), (18, 118), (19, 119)]


async def test_a_user_who_is_forgotten_is_gone(explored: ExploredLog) -> None:
    await explored.add(answer(1))
    await explored.add(answer(2))
    assert await explored.forget(1)
    assert not await explored.forget(1)
    assert await _read(explored) == [(2, 100)]


async def test_a_store_that_is_away_says_so(namespace: str) -> None:
    client = connect(StoreConfig(url="redis://127.0.0.1:1/0"))
    log = RedisExploredLog(client, namespace, LIMITS)
    for work in (log.add(answer(1)), log.read(0), log.forget(1)):
        with pytest.raises(StoreUnavailableError):
            await work
    await client.aclose()


def test_bytes_that_are_no_answer_are_refused() -> None:
    sound = answer(1)
    document = msgpack.unpackb(sound.encode())
    broken = [
        sound.encode()[:-3],
        b"",
        msgpack.packb([1]),
        msgpack.packb(document | {"format": 2}),
        msgpack.packb({name: value for name, value in document.items() if name != "items"}),
        msgpack.packb(document | {"user": None}),
        msgpack.packb(document | {"exits": document["exits"][:-4]}),
        msgpack.packb(document | {"exits": document["exits"][:-1]}),
        msgpack.packb(document | {"items": document["items"][:-1]}),
        replace(sound, exits=np.full_like(sound.exits, np.nan)).encode(),
        replace(sound, signals=np.array([np.inf], np.float32)).encode(),
    ]
    for data in broken:
        with pytest.raises(ValueError, match=r"answer|buffer|frombuffer|size|a NoneType"):
            ExploredAnswer.decode(data, 2)
