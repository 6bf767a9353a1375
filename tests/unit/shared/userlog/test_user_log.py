"""What a user log promises, checked on the one in the store and on the one in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequestError
from shared.hashing import id_key
from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog import (
    AppendResult,
    EmbeddedStore,
    HistoryQuery,
    MemoryUserLog,
    StoreConfig,
    UserLoad,
    UserLog,
    connect,
)
from shared.userlog.redis_log import RedisUserLog, UserLogConfig
from tests.unit.shared.userlog.conftest import BLOCK_EVENTS, MAX_EVENTS

MakeEvent = Callable[..., Event]

LATER = 2**40


def load(user: int | str, times: list[int], ids: list[int | str], profile: dict[str, str] | None = None) -> UserLoad:
    num_events = len(times)
    return UserLoad(
        user=user,
        item_keys=np.arange(num_events, dtype=np.int64) + 100,
        weights=(np.arange(num_events) / 3).astype(np.float32),
        sources=(np.arange(num_events) % 2).astype(np.uint8),
        timestamps_s=np.array(times, np.int64),
        event_ids=ids,
        profile=profile or {},
    )


async def test_a_user_nobody_knows(log: UserLog) -> None:
    history = await log.read("nobody", LATER, 10)
    assert len(history) == 0
    assert history.num_total == 0
    assert history.profile == {}
    assert history.item_keys.dtype == np.int64
    assert history.weights.dtype == np.float32
    assert history.timestamps_s.dtype == np.int64


async def test_what_was_appended_is_read_oldest_first(log: UserLog, event: MakeEvent) -> None:
    result = await log.append([event("a", 30, item=3, weight=4.5), event("b", 10, item="x"), event("c", 20, item=2)])
    assert result == AppendResult(appended=3)
    history = await log.read(1, LATER, 10)
    assert history.item_keys.tolist() == [id_key("x"), 2, 3]
    assert history.timestamps_s.tolist() == [10, 20, 30]
    assert history.weights.tolist() == [1.0, 1.0, 4.5]
    assert history.num_total == 3


async def test_equal_times_keep_the_order_of_arrival(log: UserLog, event: MakeEvent) -> None:
    await log.append([event("a", 10, item=1), event("b", 10, item=2)])
    await log.append([event("c", 10, item=3), event("d", 5, item=4)])
    await log.append([event("e", 10, item=5)])
    assert (await log.read(1, LATER, 10)).item_keys.tolist() == [4, 1, 2, 3, 5]


async def test_only_events_strictly_before_are_seen(log: UserLog, event: MakeEvent) -> None:
    times = [10, 20, 20, 30]
    await log.append([event(f"e{n}", time, item=time) for n, time in enumerate(times)])
    for before_s in (0, 9, 10, 11, 19, 20, 21, 29, 30, 31, LATER):
        expected = [time for time in times if time < before_s]
        history = await log.read(1, before_s, 10)
        assert history.item_keys.tolist() == expected, before_s
        assert history.num_total == len(expected)


async def test_the_newest_of_them_and_their_number(log: UserLog, event: MakeEvent) -> None:
    await log.append([event(f"e{time}", time, item=time) for time in range(5)])
    history = await log.read(1, 4, 2)
    assert history.item_keys.tolist() == [2, 3]
    assert history.num_total == 4
    nothing = await log.read(1, 4, 0)
    assert len(nothing) == 0
    assert nothing.num_total == 4
    with pytest.raises(ValueError, match="0 or more"):
        await log.read(1, 4, -1)


async def test_many_histories_at_once(log: UserLog, event: MakeEvent) -> None:
    await log.append(
        [event(f"e{time}", time, user=user, item=10 * user + time) for user in (1, 2) for time in range(5)]
    )
    queries = [HistoryQuery(2, 3), HistoryQuery(7, 9), HistoryQuery(1, 2), HistoryQuery("2", 5), HistoryQuery(2, 0)]
    histories = await log.read_many(queries, 2)
    assert [history.item_keys.tolist() for history in histories] == [[21, 22], [], [10, 11], [23, 24], []]
    assert [history.num_total for history in histories] == [3, 0, 2, 5, 0]
    assert await log.read_many([], 2) == []
    with pytest.raises(ValueError, match="0 or more"):
        await log.read_many(queries, -1)


async def test_events_keep_their_source(log: UserLog, event: MakeEvent) -> None:
    await log.append([event("a", 1, source="search"), event("b", 2), event("c", 3, source="search")])
    history = await log.read(1, LATER, 10)
    assert history.sources is not None
    assert history.sources.tolist() == [3, 0, 3]
    with pytest.raises(InvalidRequestError, match="source must be one of"):
        await log.append([event("d", 4), event("e", 5, source="nowhere")])
    assert (await log.read(1, LATER, 10)).num_total == 3


async def test_an_event_id_counts_once_a_user(log: UserLog, event: MakeEvent) -> None:
    first = [event("a", 10, item=1), event("b", 20, item=2)]
    assert await log.append([*first, event("a", 10, item=1)]) == AppendResult(appended=2, duplicates=1)
    assert await log.append(first) == AppendResult(duplicates=2)
    # The first one stays, even if the second comes with another time or item.
    assert await log.append([event("a", 99, item=9), event("c", 30, item=3)]) == AppendResult(appended=1, duplicates=1)
    assert (await log.read(1, LATER, 10)).item_keys.tolist() == [1, 2, 3]
    # Another user's event of the same id is another event.
    assert await log.append([event("a", 10, user=2)]) == AppendResult(appended=1)


async def test_many_ids_at_once_are_checked_as_single_ones_are(log: UserLog, event: MakeEvent) -> None:
    """The script takes another way from nine events on."""
    await log.append([event("known", 50, item=1)])
    result = await log.append([event("known", 50, item=1), *(event(f"n{n}", n, item=n) for n in range(60, 64))] * 3)
    assert result == AppendResult(appended=4, duplicates=11)
    assert (await log.read(1, LATER, 10)).item_keys.tolist() == [1, 60, 61, 62, 63]


async def test_ids_that_spell_the_same_number_are_the_same(log: UserLog, event: MakeEvent) -> None:
    await log.append([event("7", 10, user="42", item="5")])
    assert await log.append([event("7", 10, user=42)]) == AppendResult(duplicates=1)
    assert (await log.read(42, LATER, 10)).item_keys.tolist() == [5]
    assert len(await log.read("042", LATER, 10)) == 0


async def test_no_user_sees_another(log: UserLog, event: MakeEvent) -> None:
    users: list[int | str] = [1, 11, "a", "a:b", "a}", "{a", "ä", "a\x00", "", "i1", "s61"]
    await log.append([event(f"e{n}", 10, user=user, item=n) for n, user in enumerate(users) if user != ""])
    for n, user in enumerate(users):
        assert (await log.read(user, LATER, 10)).item_keys.tolist() == ([n] if user != "" else [])


async def test_a_log_is_bounded(log: UserLog, event: MakeEvent) -> None:
    for time in range(20):
        await log.append([event(f"e{time}", time, item=time)])
        history = await log.read(1, LATER, 100)
        assert history.num_total == time + 1  # windows over a full log move on with this number
        assert history.item_keys.tolist() == list(range(max(0, time + 1 - MAX_EVENTS), time + 1))


@pytest.mark.parametrize("num_events", [MAX_EVENTS - 1, MAX_EVENTS, MAX_EVENTS + 1, MAX_EVENTS + BLOCK_EVENTS + 1, 40])
async def test_a_batch_larger_than_a_log_keeps_its_newest(log: UserLog, event: MakeEvent, num_events: int) -> None:
    order = list(range(num_events))
    random.Random(3).shuffle(order)
    await log.append([event(f"e{time}", time, item=time) for time in order])
    history = await log.read(1, LATER, 100)
    assert history.item_keys.tolist() == list(range(num_events))[-MAX_EVENTS:]
    assert history.num_total == min(num_events, MAX_EVENTS)


async def test_events_that_went_count_where_it_is_known_that_they_are_earlier(log: UserLog, event: MakeEvent) -> None:
    for time in range(20):
        await log.append([event(f"e{time}", time, item=time)])
    assert await log.append([event("late", 17, item=99)]) == AppendResult(appended=1)
    shown = (await log.read(1, LATER, 100)).timestamps_s.tolist()
    assert shown == [15, 16, 17, 17, 18, 19]
    for before_s, expected in ((LATER, 21), (19, 20), (16, 16), (15, 0), (3, 0)):  # not a word of later events
        assert (await log.read(1, before_s, 2)).num_total == expected
    await log.delete(1)
    await log.append([event("new", 50)])
    assert (await log.read(1, LATER, 2)).num_total == 1


async def test_events_that_a_full_log_has_dropped_do_not_come_back(log: UserLog, event: MakeEvent) -> None:
    """A client that sends an old batch again must not push out newer events, whatever the slack still holds."""
    events = [event(f"e{n}", n // 2, item=n) for n in range(3 * MAX_EVENTS)]
    for one in events:
        await log.append([one])
    before = (await log.read(1, LATER, 100)).item_keys.tolist()
    assert before == list(range(3 * MAX_EVENTS))[-MAX_EVENTS:]
    for one in events:
        result = await log.append([one])
        assert result.appended == 0
        assert result.duplicates + result.expired == 1
    assert (await log.append(events)).appended == 0
    assert (await log.read(1, LATER, 100)).item_keys.tolist() == before
    assert await log.append([event("late", 0)]) == AppendResult(expired=1)


async def test_a_late_event_finds_its_place_in_a_full_log(log: UserLog, event: MakeEvent) -> None:
    await log.append([event(f"e{time}", 10 * time, item=time) for time in range(MAX_EVENTS)])
    await log.append([event("late", 25, item=99)])
    assert (await log.read(1, LATER, 100)).item_keys.tolist() == [1, 2, 99, 3, 4, 5]


async def test_load_brings_history_and_profile(log: UserLog) -> None:
    one = load(5, [30, 10, 20], [1, 2, 3], {"gender": "F", "city": "Zürich"})
    assert await log.load_many([one]) == AppendResult(appended=3)
    history = await log.read(5, LATER, 10)
    assert history.item_keys.tolist() == [101, 102, 100]
    assert history.weights.tolist() == np.array([1 / 3, 2 / 3, 0], np.float32).tolist()
    assert history.profile == {"gender": "F", "city": "Zürich"}
    assert await log.load_many([one]) == AppendResult(duplicates=3)
    assert (await log.read(5, LATER, 10)).item_keys.tolist() == [101, 102, 100]


async def test_loaded_events_and_appended_ones_share_their_ids(log: UserLog, event: MakeEvent) -> None:
    await log.load_many([load(5, [10, 20], [1, "click-2"])])
    assert await log.append([event("1", 10, user=5), event("click-2", 20, user=5)]) == AppendResult(duplicates=2)
    as_array = UserLoad(
        5, np.array([1]), np.array([1.0], np.float32), np.array([10]), np.array([1], np.int64), {"a": "b"}
    )
    assert await log.load_many([as_array]) == AppendResult(duplicates=1)


async def test_one_load_may_name_a_user_twice(log: UserLog) -> None:
    result = await log.load_many([load(5, [10], [1], {"a": "1"}), load("5", [20], [2], {"b": "2"})])
    assert result == AppendResult(appended=2)
    history = await log.read(5, LATER, 10)
    assert history.timestamps_s.tolist() == [10, 20]
    assert history.profile == {"a": "1", "b": "2"}


async def test_a_load_of_more_than_a_log_holds(log: UserLog) -> None:
    times = list(range(20))
    result = await log.load_many([load(5, times, [*range(1, 20), 1])])
    assert result.duplicates == 1
    assert (await log.read(5, LATER, 100)).timestamps_s.tolist() == times[:-1][-MAX_EVENTS:]


async def test_profile_without_events_and_nothing_at_all(log: UserLog) -> None:
    assert await log.load_many([load(5, [], [], {"a": "b"}), load(6, [], [])]) == AppendResult()
    assert (await log.read(5, LATER, 10)).profile == {"a": "b"}
    assert await log.append([]) == AppendResult()
    assert await log.load_many([]) == AppendResult()


async def test_columns_of_different_length_are_refused(log: UserLog) -> None:
    with pytest.raises(ValueError, match=r"length|shorter|longer"):
        await log.load_many(
            [UserLoad(5, np.zeros(2, np.int64), np.zeros(1, np.float32), np.zeros(2, np.int64), [1, 2])]
        )


async def test_delete_forgets_events_and_profile(log: UserLog, event: MakeEvent) -> None:
    await log.load_many([load(5, [10], [1], {"a": "b"})])
    await log.append([event("x", 10, user=6)])
    assert await log.delete(5)
    assert not await log.delete(5)
    history = await log.read(5, LATER, 10)
    assert (len(history), history.profile) == (0, {})
    assert len(await log.read(6, LATER, 10)) == 1
    assert await log.append([event("1", 10, user=5)]) == AppendResult(appended=1)  # its ids are forgotten too


async def test_extreme_values_survive(log: UserLog, event: MakeEvent) -> None:
    first = event("9" * 19, 0, item=2**63 - 1, weight=0.0)
    await log.append([first, event("z" * 128, 2**40 - 1, item="ü" * 100, weight=1e6)])
    history = await log.read(1, 2**40, 10)
    assert history.timestamps_s.tolist() == [0, 2**40 - 1]
    assert history.item_keys.tolist() == [2**63 - 1, id_key("ü" * 100)]
    assert history.weights.tolist() == [0.0, 1e6]


OPERATION: st.SearchStrategy[tuple[str, list[tuple[int, int]]]] = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=14)),
    st.tuples(st.just("load"), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=14)),
    st.just(("delete", [])),
)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


# No shrinking: it would take minutes of round trips; the model makes even a long failing example easy to follow.
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=st.lists(OPERATION, max_size=10))
def test_the_store_and_the_plain_model_never_differ(
    runner: asyncio.Runner, server: EmbeddedStore, operations: list[tuple[str, list[tuple[int, int]]]]
) -> None:
    """Any sequence of appends, loads and deletes of one user leaves both with the same history at every time."""
    runner.run(_compare(server, operations))


async def _compare(server: EmbeddedStore, operations: list[tuple[str, list[tuple[int, int]]]]) -> None:
    client = connect(StoreConfig(url=server.url))
    config = UserLogConfig(namespace="model", max_events=MAX_EVENTS, block_events=BLOCK_EVENTS, timeout_ms=5_000)
    real, model = RedisUserLog(client, config), MemoryUserLog(MAX_EVENTS)
    await real.delete(1)
    try:
        for kind, pairs in operations:
            for log in (real, model):
                await _apply(log, kind, pairs)
            for before_s, limit in ((5, 2), (12, 100), (100, 3), (LATER, 4), (LATER, 100)):
                assert _plain(await real.read(1, before_s, limit)) == _plain(await model.read(1, before_s, limit))
    finally:
        await client.aclose()


async def _apply(log: UserLog, kind: str, pairs: list[tuple[int, int]]) -> None:
    if kind == "delete":
        await log.delete(1)
        return
    if kind == "load":
        result = await log.load_many([load(1, [time for _, time in pairs], [number for number, _ in pairs])])
    else:
        events = [
            Event(
                event_id=str(number),
                user_id=1,
                item_id=position if position % 3 else f"item-{position}",
                weight=position / 4,
                timestamp_s=time << (position % 2 * 20),
                source=("feed", None)[position % 2],
            )
            for position, (number, time) in enumerate(pairs)
        ]
        result = await log.append(events)
    assert result.appended + result.duplicates + result.expired == len(pairs)


def _plain(history: UserHistory) -> tuple[object, ...]:
    assert history.sources is not None
    columns = (history.item_keys, history.timestamps_s, history.weights, history.sources)
    return (*(column.tolist() for column in columns), history.num_total, history.profile)


@pytest.mark.parametrize("num_more", [0, 2])
async def test_an_id_whose_bytes_lie_across_two_others_or_in_another_column_is_new(
    log: UserLog, event: MakeEvent, num_more: int
) -> None:
    def id_of(*digits: int) -> str:
        return str(int.from_bytes(bytes(digits), "little"))

    first, second = id_of(1, 2, 3, 4, 5, 6), id_of(7, 8, 9, 10, 11, 12)
    await log.append([event(first, 1, item=21), event(second, 2, item=22)])
    more = [event(f"more{n}", 10 + n) for n in range(num_more)]  # a few ids are searched for in another way than many
    across = [event(id_of(4, 5, 6, 7, 8, 9), 3, item=23), event(first, 9), event(second, 9)]
    assert await log.append([*across, *more]) == AppendResult(appended=1 + num_more, duplicates=2)
    await log.delete(1)
    # The items of six events are six bytes, one after the other, and so would be the id that has these.
    await log.append([event(str(n), n, item=n) for n in range(1, 7)])
    assert await log.append([event(id_of(1, 2, 3, 4, 5, 6), 50), *more]) == AppendResult(appended=1 + num_more)
