from __future__ import annotations

import io
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Any, cast

import numpy as np
import pytest

from models.random_weights import TINY
from models.stations import RequestEncoder
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from shared.clock import ManualClock
from shared.errors import DeadlineExceededError, StoreUnavailableError, VersionMismatchError
from shared.log import JsonLogger
from shared.schema.api import Event
from shared.schema.user import EncodeTask, UserHistory
from shared.userlog import BufferConfig, MemoryUserLog, UserLog
from shared.weights.held import OneVersion
from tests.helpers.faulty import HANG, FaultyService
from tests.helpers.waiting import as_time_passes
from tests.helpers.weights import random_weights

LENGTH = 6
SOURCE = random_weights(TINY.model_copy(update={"history_length": LENGTH}))
ENCODER = RequestEncoder.from_weights(SOURCE)


class Rig:
    """A sequence replica over a log that can be taken away."""

    def __init__(self, executor: Executor | None = None, **config: Any) -> None:
        self.clock = ManualClock()
        self.log = MemoryUserLog()
        self.door = FaultyService(self.log, self.clock)
        self.lines = io.StringIO()
        buffer = BufferConfig(events_max=5, retry_interval_ms=100)
        self.service = SequenceService(
            SequenceConfig(store_timeout_ms=20, buffer=buffer, **config),
            OneVersion(SOURCE.version, ENCODER),
            cast(UserLog, self.door),
            self.clock,
            "sequence-0",
            JsonLogger(stream=self.lines),
            executor,
        )

    def task(self, user: int | str = 3, as_of_s: int = 1_000, **fields: Any) -> EncodeTask:
        values = {"request_id": "r/1", "version": SOURCE.version, "surface": "web", "remaining_ms": 1_000.0, **fields}
        return EncodeTask(user=user, as_of_s=as_of_s, **values)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.log.down = False
    await rig.service.aclose()


def events(*times: int, user: int = 3) -> list[Event]:
    return [
        Event(event_id=f"e{time}", user_id=user, item_id=time % 40 + 1, weight=4, timestamp_s=time) for time in times
    ]


async def test_the_state_is_the_encoders_for_what_the_log_holds(rig: Rig) -> None:
    await rig.service.append(events(100, 200, 300))

    state = await rig.service.encode(rig.task())

    history = UserHistory(np.array([21, 1, 21]), np.full(3, 4, np.float32), np.array([100, 200, 300]), 3)
    for name, expected in ENCODER.encode(history, 3, "web", 1_000).items():
        np.testing.assert_array_equal(state.tensors[name], expected)
    assert (state.history_length, state.last_event_s, state.degraded) == (3, 300, "")
    assert (state.stamp.request_id, state.stamp.version, state.stamp.station) == ("r/1", SOURCE.version, "sequence")


async def test_only_events_strictly_before_the_request_count(rig: Rig) -> None:
    await rig.service.append(events(100, 200, 300))

    assert (await rig.service.encode(rig.task(as_of_s=300))).last_event_s == 200
    assert (await rig.service.encode(rig.task(as_of_s=100))).history_length == 0


async def test_a_long_history_is_cut_to_the_newest(rig: Rig) -> None:
    await rig.service.append(events(*range(100, 110)))
    assert (await rig.service.encode(rig.task())).history_length == LENGTH


async def test_a_user_without_anything_is_encoded_like_the_empty_history(rig: Rig) -> None:
    state = await rig.service.encode(rig.task("stranger"))

    expected = ENCODER.encode(UserHistory.empty(), "stranger", "web", 1_000)
    for name, value in state.tensors.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, expected[name])
    assert (state.degraded, state.last_event_s) == ("", 0)


async def test_an_empty_history_leaves_no_trace_in_the_next_users_state(rig: Rig) -> None:
    await rig.service.append(events(100, 200))
    cold = await rig.service.encode(rig.task())
    await rig.service.encode(rig.task("stranger"))

    warm = await rig.service.encode(rig.task())

    for name, value in warm.tensors.items():
        np.testing.assert_array_equal(value, cold.tensors[name])


@pytest.mark.parametrize("how", ["down", "silent"])
async def test_a_store_out_of_reach_gives_the_last_known_history_marked(rig: Rig, how: str) -> None:
    await rig.service.append(events(100, 200))
    known = await rig.service.encode(rig.task())
    take_away(rig, how)

    state = await as_time_passes(rig.clock, rig.service.encode(rig.task()))

    assert state.degraded == "stale_history"
    for name, value in state.tensors.items():
        np.testing.assert_array_equal(value, known.tensors[name])


async def test_a_last_known_history_never_shows_a_request_its_future(rig: Rig) -> None:
    await rig.service.append(events(100, 200, 300))
    await rig.service.encode(rig.task())
    rig.log.down = True

    state = await rig.service.encode(rig.task(as_of_s=200))

    assert (state.degraded, state.history_length, state.last_event_s) == ("stale_history", 1, 100)


@pytest.mark.parametrize("how", ["down", "silent"])
async def test_a_store_out_of_reach_gives_an_unknown_user_an_empty_history_marked(rig: Rig, how: str) -> None:
    await rig.service.append(events(100))
    take_away(rig, how)

    state = await as_time_passes(rig.clock, rig.service.encode(rig.task()))

    assert (state.degraded, state.history_length) == ("store_unavailable", 0)
    assert rig.service.status()["counters"]["degraded.store_unavailable"] == 1


async def test_last_known_histories_are_bounded_least_recently_used_first() -> None:
    rig = Rig(cached_users_max=2)
    for user in (1, 2, 1, 3):
        await rig.service.encode(rig.task(user))
    rig.log.down = True

    states = [await rig.service.encode(rig.task(user)) for user in (1, 2, 3)]

    assert [state.degraded for state in states] == ["stale_history", "store_unavailable", "stale_history"]
    assert rig.service.status()["counters"]["cached_users"] == 2
    rig.log.down = False
    await rig.service.aclose()


async def test_digits_and_number_are_the_same_user(rig: Rig) -> None:
    await rig.service.append(events(100))
    await rig.service.encode(rig.task("3"))
    rig.log.down = True

    assert (await rig.service.encode(rig.task(3))).degraded == "stale_history"


async def test_events_are_buffered_while_the_store_is_down_and_written_when_it_is_back(rig: Rig) -> None:
    rig.log.down = True
    assert await rig.service.append(events(100, 200)) == {"appended": 0, "duplicates": 0, "expired": 0, "buffered": 2}
    assert rig.service.status()["counters"]["buffered_events"] == 2
    await rig.clock.advance(0.1)
    rig.log.down = False

    await rig.clock.advance(0.1)

    assert (await rig.service.encode(rig.task())).last_event_s == 200
    assert rig.service.status()["counters"]["buffered_events"] == 0


@pytest.mark.parametrize(("count", "fits"), [(4, True), (5, True), (6, False)])
async def test_the_event_buffer_is_bounded_and_takes_all_or_none(rig: Rig, count: int, fits: bool) -> None:
    rig.log.down = True
    if fits:
        assert (await rig.service.append(events(*range(count))))["buffered"] == count
    else:
        with pytest.raises(StoreUnavailableError):
            await rig.service.append(events(*range(count)))
    assert rig.service.status()["counters"]["buffered_events"] == (count if fits else 0)


async def test_an_event_sent_twice_is_kept_once(rig: Rig) -> None:
    assert (await rig.service.append(events(100)))["appended"] == 1
    assert await rig.service.append(events(100)) == {"appended": 0, "duplicates": 1, "expired": 0, "buffered": 0}


async def test_events_that_a_closing_replica_cannot_write_are_reported(rig: Rig) -> None:
    rig.log.down = True
    await rig.service.append(events(100, 200))

    await rig.service.aclose()

    assert "events_lost" in rig.lines.getvalue()
    assert rig.service.status()["counters"]["events.lost"] == 2


async def test_another_version_and_an_expired_request_are_refused(rig: Rig) -> None:
    with pytest.raises(VersionMismatchError):
        await rig.service.encode(rig.task(version="other"))
    with pytest.raises(DeadlineExceededError):
        await rig.service.encode(rig.task(remaining_ms=0.0))
    assert not rig.door.started


def take_away(rig: Rig, how: str) -> None:
    """Make the store refuse, or answer nothing."""
    if how == "down":
        rig.log.down = True
    else:
        rig.door.always("read", HANG)
