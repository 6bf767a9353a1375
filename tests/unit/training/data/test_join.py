"""Histories out of a user log: equal to those of the event log, to the bit, for every row and every training step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.histories import user_loads
from models.config import EncoderConfig, RankerConfig
from shared.errors import ConfigError, DataUnavailableError
from shared.userlog import EmbeddedStore, EmbeddedStoreConfig, MemoryUserLog, RedisUserLog, StoreConfig, connect
from tests.helpers.tiny_dataset import tiny_dataset
from training.config import TrainConfig
from training.data import (
    Align,
    Dataset,
    EventLog,
    HistoryBatch,
    HistoryReader,
    HistoryStoreConfig,
    StoredHistories,
    request_batches,
)
from training.data.dataset import Catalog, UserTable
from training.data.split import split_by_time
from training.loop import train

Event = tuple[int, int, int, int]
MakeLog = Callable[[Sequence[Event], int], EventLog]

FIELDS = ("item_ids", "ratings", "timestamps_s", "surfaces", "mask", "lengths", "num_total")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    folder: Path = tmp_path_factory.mktemp("store")
    with EmbeddedStore(folder, EmbeddedStoreConfig(die_with_parent=True, fsync="no")) as store:
        yield store


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def equal(one: HistoryBatch, other: HistoryBatch) -> bool:
    pairs = [(getattr(one, field), getattr(other, field)) for field in FIELDS]
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def load_into(store: EmbeddedStore, dataset: Dataset, runner: asyncio.Runner) -> HistoryStoreConfig:
    """Put the whole data set into the store, the events of the test period too: time alone keeps them apart."""
    config = HistoryStoreConfig(client=StoreConfig(url=store.url))

    async def load() -> None:
        client = connect(config.client)
        await RedisUserLog(client, config.log).load_many(user_loads(dataset, 2**40, 4_096))
        await client.aclose()

    runner.run(load())
    return config


def test_every_row_reads_the_same_from_store_and_log(server: EmbeddedStore, runner: asyncio.Runner) -> None:
    dataset = tiny_dataset()
    config = load_into(server, dataset, runner)
    client = connect(config.client)
    stored = StoredHistories(RedisUserLog(client, config.log), dataset, runner)
    rows = dataset.log.rows(dataset.log.time_order)
    for length in (1, 300):
        joined = HistoryReader(dataset.log, length, "strict", "right", histories=stored)
        own = HistoryReader(dataset.log, length, "strict", "right")
        for one, other in zip(request_batches(rows, joined, 6_000), request_batches(rows, own, 6_000), strict=True):
            assert equal(one.history, other.history)
    runner.run(client.aclose())


def test_training_out_of_the_store_gives_the_same_weights(server: EmbeddedStore, runner: asyncio.Runner) -> None:
    model = RankerConfig(width=8, history_length=12, num_layers=1, encoder=EncoderConfig(num_events=8))
    config = TrainConfig(name="join", dataset="synthetic", threads=1, batch_rows=512, train_share=0.05, model=model)
    stored = config.model_copy(update={"histories": load_into(server, tiny_dataset(), runner)})
    one, other = (train(each, tiny_dataset()).ranker.state_dict() for each in (config, stored))
    assert all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=40)
@given(st.data())
def test_any_log_and_time(make_log: MakeLog, event_lists: st.SearchStrategy[list[Event]], data: st.DataObject) -> None:
    log = make_log(data.draw(event_lists), 4)
    dataset = small(log)
    user_log = MemoryUserLog()
    length, align = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(get_args(Align)))
    users = np.array(data.draw(st.lists(st.integers(0, 3), max_size=9)), np.int64)
    times = np.array([data.draw(st.integers(99, 108)) for _ in users], np.int64)
    with asyncio.Runner() as runner:
        runner.run(user_log.load_many(user_loads(dataset, 2**40, 100)))
        stored = StoredHistories(user_log, dataset, runner)
        joined = HistoryReader(log, length, "strict", align, histories=stored).read_at(users, times)
    assert equal(joined, HistoryReader(log, length, "strict", align).read_at(users, times))


def small(log: EventLog, surfaces: tuple[str, ...] = ("ml-1m",)) -> Dataset:
    """Wrap a log of up to four users and six items."""
    one_genre = np.arange(7, dtype=np.int64)
    catalog = Catalog(
        item_id=np.arange(1, 7, dtype=np.int64),
        title=("",) * 6,
        year=np.zeros(6, np.int16),
        genre_names=("", "a"),
        genre_values=np.ones(6, np.int16),
        genre_offsets=one_genre,
        group_id=np.ones(6, np.int64),
    )
    nothing = np.zeros(4, np.int16)
    users = UserTable(np.arange(10, 14, dtype=np.int64), np.zeros(4, np.uint8), nothing, nothing, ("",), ("",) * 4)
    return Dataset("small", "hand-made", surfaces, catalog, users, log, split_by_time(log))


def test_a_surface_that_the_log_does_not_know_is_refused(make_log: MakeLog, runner: asyncio.Runner) -> None:
    dataset = small(make_log([(0, 1, 3, 10)], 4), ("mail",))
    with pytest.raises(DataUnavailableError, match="not mail"):
        StoredHistories(MemoryUserLog(), dataset, runner)
    with pytest.raises(ConfigError, match="sources must name mail, a surface of small"):
        list(user_loads(dataset, 100, 10))


def test_what_only_the_event_log_has_is_not_read_elsewhere(make_log: MakeLog, runner: asyncio.Runner) -> None:
    log = make_log([(0, 1, 3, 10)], 4)
    stored = StoredHistories(MemoryUserLog(), small(log), runner)
    with pytest.raises(ValueError, match="mode strict, not pub"):
        HistoryReader(log, 3, "pub", histories=stored)
