"""A user who is forgotten leaves nothing behind: not in the log, not in the buffer, not in the cache of histories."""

from __future__ import annotations

import numpy as np

from services.sequence.histories import HistoryCache
from shared.schema.user import UserHistory
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
