"""A user who is forgotten leaves nothing behind: not in the log, not in the buffer, not in the cache of histories."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from services.sequence.histories import HistoryCache
from shared.schema.user import UserHistory
from shared.userlog import MemoryUserLog
from tests.helpers.waiting import until
from tests.unit.services.sequence.test_sequence import Rig, events


async def test_log_and_cache_forget() -> None:
    rig = Rig()
    await rig.service.append(events(100, 200))
    assert (await rig.service.encode(rig.task())).history_length == 2
    assert await rig.service.forget(3)
    assert not await rig.service.forget("3")
    rig.log.down = True
    state = await rig.service.encode(rig.task())
    assert (state.history_length, state.degraded) == (0, "store_unavailable")
    rig.log.down = False
    await rig.service.aclose()


@pytest.mark.parametrize("where", ["reading", "encoding"])
async def test_an_encode_under_way_keeps_nothing_of_a_user_who_is_forgotten(where: str) -> None:
    """It has the events already: its answer may tell of them, nothing after it may."""
    executor = HeldExecutor()
    rig = Rig(executor=executor if where == "encoding" else None)
    await rig.service.append(events(100, 200))
    late = LateReply(rig.log)
    if where == "reading":
        rig.door.inner = late
    encoding = asyncio.create_task(rig.service.encode(rig.task()))
    await until(lambda: late.has_read if where == "reading" else executor.num_waiting == 1)
    forgetting = asyncio.create_task(rig.service.forget("3"))
    await until(lambda: forgetting.done() if where == "reading" else executor.num_waiting == 2)
    late.gate.set()
    executor.release()
    assert (await encoding).history_length == 2
    assert await forgetting
    counters = rig.service.status()["counters"]
    assert (counters["cached_states"], counters["cached_users"]) == (0, 0)
    executor.release()
    rig.log.down = True
    assert (await rig.service.encode(rig.task())).degraded == "store_unavailable"
    rig.log.down = False
    await rig.service.aclose()


class LateReply:
    """A log whose replies to reads are held back.

    Args:
        log: The log.
    """

    def __init__(self, log: MemoryUserLog) -> None:
        self._log = log
        self.gate = asyncio.Event()
        self.has_read = False

    async def read(self, user: int, before_s: int, limit: int) -> UserHistory:
        history = await self._log.read(user, before_s, limit)
        self.has_read = True
        await self.gate.wait()
        return history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class HeldExecutor(Executor):
    """Runs work in order, on one thread, once it is released."""

    def __init__(self) -> None:
        self._inner = ThreadPoolExecutor(1)
        self._gate = threading.Event()
        self.num_waiting = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def released() -> Any:
            assert self._gate.wait(10)
            return work(*args, **kwargs)

        self.num_waiting += 1
        return self._inner.submit(released)

    def release(self) -> None:
        self._gate.set()


def test_a_cached_history_is_cut_with_its_sources() -> None:
    cache = HistoryCache(2)
    times, sources = np.array([10, 20, 30]), np.array([1, 0, 2], np.uint8)
    cache.keep(7, UserHistory(times, times.astype(np.float32), times, 3, sources=sources))
    cut = cache.last_known("7", 30)
    assert cut is not None
    assert cut.sources is not None
    assert cut.sources.tolist() == [1, 0]
    cache.forget("7")
    assert cache.last_known(7, 30) is None
