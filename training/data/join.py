"""Joins rows with histories from a user log: the very log, and the very reader, that serving has.

A row holds user and time; its history is read when the batch is made, a batch in one round trip or a few. So training
needs no copy of the events, and what it learns from is what a server would have seen: strictly earlier events, cut to
the length of the model, from the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.config import Config
from shared.errors import DataUnavailableError
from shared.schema.user import UserHistory
from shared.userlog import HistoryQuery, RedisUserLog, StoreConfig, UserLog, UserLogConfig, connect
from training.data.dataset import Dataset


class HistoryStoreConfig(Config):
    """A user log that training reads; it must hold the events of the data set (``rankmesh run`` loads them).

    Args:
        client: How to reach the store.
        log: The log's namespace and limits; the namespace is the name of the mesh that serves from it.
    """

    client: StoreConfig = StoreConfig()
    log: UserLogConfig = UserLogConfig(timeout_ms=10_000)


class JoinedBatch:
    """Histories of B rows, and how a log's sources are numbered as the data set's surfaces.

    Args:
        histories: B histories.
        surface_of_source: uint8, surface by source number.
    """

    __slots__ = ("histories", "surface_of_source")

    def __init__(self, histories: Sequence[UserHistory], surface_of_source: npt.NDArray[np.uint8]) -> None:
        self.histories = histories
        self.surface_of_source = surface_of_source


class Histories(Protocol):
    """Gives the histories of users, each before its time."""

    def read(self, user_index: npt.NDArray[np.integer], before_s: npt.NDArray[np.int64], length: int) -> JoinedBatch:
        """Return the newest ``length`` events of each user strictly before each time."""
        ...


class StoredHistories:
    """Histories of a data set's users out of a user log.

    Args:
        log: The log.
        dataset: Whose users and surfaces the rows mean.
        runner: Runs the log's calls; a client of a store belongs to one event loop.

    Raises:
        DataUnavailableError: the log does not know a surface of the data set.
    """

    def __init__(self, log: UserLog, dataset: Dataset, runner: asyncio.Runner) -> None:
        if missing := sorted(set(dataset.surfaces) - set(log.sources)):
            raise DataUnavailableError(
                f"the user log has sources {', '.join(log.sources)}, not {', '.join(missing)}",
                field="sources",
                value=missing[0],
            )
        self._log = log
        self._user_id = dataset.users.user_id
        self._runner = runner
        numbers = {surface: number for number, surface in enumerate(dataset.surfaces)}
        self._surface_of_source = np.array([numbers.get(source, 0) for source in log.sources], np.uint8)

    def read(self, user_index: npt.NDArray[np.integer], before_s: npt.NDArray[np.int64], length: int) -> JoinedBatch:
        """Return the newest ``length`` events of each user strictly before each time.

        Raises:
            StoreUnavailableError: the store cannot be reached or refuses.
        """
        users = self._user_id[user_index].tolist()
        queries = [HistoryQuery(user, time) for user, time in zip(users, before_s.tolist(), strict=True)]
        return JoinedBatch(self._runner.run(self._log.read_many(queries, length)), self._surface_of_source)


@contextmanager
def stored_histories(config: HistoryStoreConfig | None, dataset: Dataset) -> Iterator[StoredHistories | None]:
    """Connect to a store for the time of a training run; without a configuration there is nothing to connect to.

    Raises:
        DataUnavailableError: the log does not know a surface of the data set.
    """
    if config is None:
        yield None
        return
    with asyncio.Runner() as runner:
        client = connect(config.client)
        try:
            yield StoredHistories(RedisUserLog(client, config.log), dataset, runner)
        finally:
            runner.run(client.aclose())
