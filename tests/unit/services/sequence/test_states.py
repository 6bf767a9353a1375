"""States are kept within their bytes, by version, user and surface; a second request encodes new events alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest

from models.history import EncodedHistory
from models.random_weights import TINY
from models.stations import RequestEncoder
from services.sequence.config import SequenceConfig
from services.sequence.service import SequenceService
from services.sequence.states import StateCache
from shared.clock import ManualClock
from shared.schema.api import Event
from shared.schema.user import EncodeTask, UserHistory, UserState
from shared.userlog import MemoryUserLog, UserLog
from shared.weights.held import OneVersion
from tests.helpers.weights import random_weights

ENCODER_CONFIG = TINY.encoder.model_copy(update={"num_events": 14, "window_step": 4})
SOURCE = random_weights(TINY.model_copy(update={"encoder": ENCODER_CONFIG}), golden=False)
ENCODER = RequestEncoder(SOURCE)


def _encoded(length: int) -> EncodedHistory:
    history = UserHistory(np.arange(length), np.ones(length, np.float32), np.arange(length), length)
    return ENCODER.encode_from(None, history, 1, "web", 100).history


def _service(cached_state_bytes: int = 1_000_000, max_events: int = 4_096) -> tuple[SequenceService, MemoryUserLog]:
    log = MemoryUserLog(max_events)
    versions = OneVersion(SOURCE.version, ENCODER)
    return SequenceService(
        SequenceConfig(cached_state_bytes=cached_state_bytes), versions, cast(UserLog, log), ManualClock(), "sequence-0"
    ), log


@pytest.fixture
async def service() -> AsyncIterator[SequenceService]:
    made, _ = _service()
    yield made
    await made.aclose()


def _events(*times: int, user: int = 3) -> list[Event]:
    return [Event(event_id=f"{user}/{t}", user_id=user, item_id=t % 40 + 1, weight=4, timestamp_s=t) for t in times]


def _task(user: int | str = 3, as_of_s: int = 1_000, surface: str = "web") -> EncodeTask:
    return EncodeTask("r/1", SOURCE.version, user, surface, as_of_s, 1_000.0)


def _counts(service: SequenceService) -> tuple[int, int]:
    counters = service.status()["counters"]
    return counters["history_events.encoded"], counters["history_events.reused"]


def _same(found: UserState, expected: UserState) -> None:
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], value, err_msg=name)


def test_the_least_recently_used_leaves_when_room_is_needed() -> None:
    state = _encoded(4)
    cache = StateCache(2 * state.num_bytes + 1)
    for user in (1, 2):
        cache.keep("v", user, "web", state)
    assert cache.find("v", 1, "web") is state
    cache.keep("v", 3, "web", state)
    assert [cache.find("v", user, "web") is not None for user in (1, 2, 3)] == [True, False, True]
    assert (len(cache), cache.num_bytes) == (2, 2 * state.num_bytes)


@pytest.mark.parametrize(("spare", "kept"), [(-1, 0), (0, 1), (1, 1)])
def test_a_state_larger_than_the_room_is_not_kept(spare: int, kept: int) -> None:
    state = _encoded(4)
    cache = StateCache(state.num_bytes + spare)
    cache.keep("v", 1, "web", state)
    assert len(cache) == kept
    assert cache.num_bytes == kept * state.num_bytes


def test_version_user_and_surface_tell_states_apart() -> None:
    cache, state = StateCache(1_000_000), _encoded(4)
    cache.keep("v", "1", "web", state)
    assert cache.find("v", 1, "web") is state
    for version, user, surface in (("w", 1, "web"), ("v", 2, "web"), ("v", 1, "app")):
        assert cache.find(version, user, surface) is None
    cache.keep("v", 1, "web", longer := _encoded(6))
    assert cache.find("v", 1, "web") is longer
    assert cache.num_bytes == longer.num_bytes


def test_a_forgotten_user_has_no_state_of_any_surface_or_version() -> None:
    cache, state = StateCache(1_000_000), _encoded(4)
    for version, user, surface in (("v", 1, "web"), ("w", 1, "app"), ("v", 2, "web")):
        cache.keep(version, user, surface, state)
    cache.forget("1")
    assert (len(cache), cache.num_bytes) == (1, state.num_bytes)
    assert cache.find("v", 2, "web") is state


async def test_a_second_request_encodes_only_what_is_new_and_answers_the_same(service: SequenceService) -> None:
    await service.append(_events(100, 200, 300, 400))
    await service.encode(_task())
    await service.append(_events(500, 600))
    again = await service.encode(_task(as_of_s=2_000))
    assert _counts(service) == (6, 4)
    fresh, log = _service(cached_state_bytes=0)
    await log.append(_events(100, 200, 300, 400, 500, 600))
    _same(again, await fresh.encode(_task(as_of_s=2_000)))
    await fresh.encode(_task(as_of_s=2_000))
    assert _counts(fresh) == (12, 0)
    await fresh.aclose()


async def test_many_requests_of_one_user_at_once_encode_his_events_once(service: SequenceService) -> None:
    await service.append(_events(*range(100, 900, 100)))
    states = await asyncio.gather(*(service.encode(_task()) for _ in range(20)))
    assert _counts(service) == (8, 19 * 8)
    for state in states[1:]:
        _same(state, states[0])


async def test_an_event_that_came_late_and_belongs_earlier_makes_the_state_anew(service: SequenceService) -> None:
    await service.append(_events(100, 300))
    await service.encode(_task())
    await service.append(_events(200))
    await service.encode(_task())
    assert _counts(service) == (5, 0)


async def test_a_forgotten_user_is_encoded_anew(service: SequenceService) -> None:
    await service.append(_events(100, 200))
    await service.encode(_task())
    assert service.status()["counters"]["cached_states"] == 1
    await service.forget(3)
    assert service.status()["counters"]["cached_states"] == 0
    assert (await service.encode(_task())).history_length == 0


async def test_a_full_log_costs_its_new_events_alone_too() -> None:
    """It shows the same number of events for ever; the window must go by how many there ever were."""
    service, _ = _service(max_events=20)
    encoded = []
    for time in range(60):
        before = service.meter.counts["history_events.encoded"]
        await service.append(_events(time))
        await service.encode(_task())
        encoded.append(service.meter.counts["history_events.encoded"] - before)
    assert encoded[22:58] == [11, 1, 1, 1] * 9  # the window moves on by a step of 4
    await service.aclose()
