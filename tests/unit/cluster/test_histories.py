"""What is loaded into the user log, and when it is not loaded again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from cluster.histories import HistorySource, HistoryStore, Loaded, user_loads
from shared.errors import StoreUnavailableError
from shared.userlog import AppendResult, MemoryUserLog, UserLoad
from shared.userlog.client import StoreClient
from tests.helpers.tiny_dataset import tiny_dataset


class FakeClient:
    """Keeps values by key, as a store does."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def set(self, key: str, value: bytes) -> None:
        self.values[key] = value


class BrokenLog(MemoryUserLog):
    """A store that goes away in the middle of a load."""

    async def load_many(self, loads: Iterable[UserLoad]) -> AppendResult:
        for number, _ in enumerate(loads):
            if number == 3:
                break
        raise StoreUnavailableError("gone")


def source() -> HistorySource:
    dataset = tiny_dataset()
    return HistorySource(dataset.name, dataset.provenance, dataset.split.test_start_s, 4_096)


def store(client: FakeClient, log: MemoryUserLog) -> HistoryStore:
    return HistoryStore(cast(StoreClient, client), log, "mesh")


async def test_every_user_gets_the_past_and_the_profile_and_nothing_later() -> None:
    dataset, log = tiny_dataset(), MemoryUserLog()
    loaded = await store(FakeClient(), log).load(source(), dataset)
    until_s = dataset.split.test_start_s
    assert loaded == Loaded(len(dataset.users), int((dataset.log.timestamp_s < until_s).sum()), already=False)
    for user_index, user_id in enumerate(dataset.users.user_id.tolist()):
        history = await log.read(user_id, 2**40, 4_096)
        assert history.profile == dataset.users.profile(user_index)
        mine = (dataset.log.user_index == user_index) & (dataset.log.timestamp_s < until_s)
        assert history.timestamps_s.tolist() == dataset.log.timestamp_s[mine].tolist()
        assert sorted(history.item_keys.tolist()) == sorted(dataset.log.item_id[mine].tolist())


def test_only_the_newest_events_of_a_user() -> None:
    dataset = tiny_dataset()
    loads = list(user_loads(dataset, dataset.split.test_start_s, 5))
    assert max(map(len, loads)) == 5
    assert len(loads) == len(dataset.users)


async def test_the_mark_tells_the_same_source_from_another() -> None:
    client, log = FakeClient(), MemoryUserLog()
    histories = store(client, log)
    assert await histories.find(source()) is None
    loaded = await histories.load(source(), tiny_dataset())
    assert await histories.find(source()) == Loaded(loaded.num_users, loaded.num_events, already=True)
    others = [
        HistorySource("ml-1m", source().provenance, source().until_s, 4_096),
        HistorySource(source().dataset, "another", source().until_s, 4_096),
        HistorySource(source().dataset, source().provenance, source().until_s + 1, 4_096),
        HistorySource(source().dataset, source().provenance, source().until_s, 1),
    ]
    assert [await histories.find(other) for other in others] == [None] * 4
    assert all(key.startswith("mesh:loaded:") for key in client.values)


async def test_an_interrupted_load_leaves_no_mark() -> None:
    client = FakeClient()
    with pytest.raises(StoreUnavailableError):
        await store(client, BrokenLog()).load(source(), tiny_dataset())
    assert client.values == {}


async def test_loading_again_changes_nothing() -> None:
    dataset, log = tiny_dataset(), MemoryUserLog()
    histories = store(FakeClient(), log)
    await histories.load(source(), dataset)
    user_id = int(dataset.users.user_id[0])
    before = await log.read(user_id, 2**40, 4_096)
    await histories.load(source(), dataset)
    assert (await log.read(user_id, 2**40, 4_096)).num_total == before.num_total
