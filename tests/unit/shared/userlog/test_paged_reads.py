"""Long histories in several round trips: whatever is written between two of them, what is read was once in the log."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from shared.schema.api import Event
from shared.schema.user import UserHistory
from shared.userlog import (
    AppendResult,
    EmbeddedStore,
    HistoryQuery,
    MemoryUserLog,
    StoreConfig,
    UserLoad,
    connect,
)
from shared.userlog.blocks import decode_blocks, encode_blocks
from shared.userlog.client import StoreClient
from shared.userlog.reads import HistoryRead
from shared.userlog.records import RECORD
from shared.userlog.redis_log import RedisUserLog, UserLogConfig

MakeEvent = Callable[..., Event]
Step: TypeAlias = tuple[str, int]
View: TypeAlias = tuple[list[int], list[int], int]

LATER = 2**40
KEEP, BLOCK, PAGE, RESTARTS = 20, 3, 4, 2

STEP: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("new"), st.integers(1, 9)),
    st.tuples(st.just("late"), st.integers(0, 30)),
    st.just(("delete", 0)),
    st.just(("nothing", 0)),
)
STEPS = st.lists(STEP, min_size=1, max_size=12)


def view(history: UserHistory) -> View:
    return history.item_keys.tolist(), history.timestamps_s.tolist(), history.num_total


class Writable(Protocol):
    async def append(self, events: Sequence[Event]) -> AppendResult: ...

    async def delete(self, user: int) -> bool: ...


class Writer:
    """Writes the same steps to any logs: every event has an item of its own, so a history names the events it has.

    Args:
        logs: The logs.
    """

    def __init__(self, *logs: Writable) -> None:
        self._logs = logs
        self._numbers = itertools.count()
        self._now = 0

    async def step(self, step: Step) -> None:
        kind, value = step
        if kind == "nothing":
            return
        if kind == "delete":
            for log in self._logs:
                await log.delete(1)
            return
        times = [self._now + 1 + n // 2 for n in range(value)] if kind == "new" else [max(self._now - value, 0)]
        self._now = max(self._now, *times)
        numbers = [next(self._numbers) for _ in times]
        events = [
            Event(event_id=str(number), user_id=1, item_id=number, weight=1.0, timestamp_s=time)
            for number, time in zip(numbers, times, strict=True)
        ]
        for log in self._logs:
            await log.append(events)


class BlockStore:
    """One user's log in Python, in blocks whose numbers and epoch change as the scripts change them, and its reader."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # events up to the end of each block, over all that this epoch had
        self._rows: list[tuple[int, int]] = []  # time and item of every event of this epoch, cut ones included
        self._gone = 0
        self._went = 0  # events that earlier epochs cut
        self.epoch = 1

    async def append(self, events: Sequence[Event]) -> AppendResult:
        for event in events:
            self._add(event.timestamp_s, int(event.item_id))
        while len(self._ends) - self._gone > 1 and len(self._rows) - self._ends[self._gone] >= KEEP:
            self._gone += 1
        return AppendResult(appended=len(events))

    async def delete(self, user: int) -> bool:
        self._ends, self._rows, self._gone, self._went = [], [], 0, 0
        self.epoch += 1
        return True

    def _add(self, time: int, item: int) -> None:
        if self._rows and self._rows[-1][0] > time:
            shown = self._rows[-KEEP:]
            if len(shown) == KEEP and time <= shown[0][0]:
                return
            self._went += self._begin()
            held = [*self._rows[self._begin() :], (time, item)]
            self._rows = sorted(held, key=lambda row: row[0])
            self._ends = [*range(BLOCK, len(held), BLOCK), len(held)]
            self._gone = 0
            self.epoch += 1
            return
        self._rows.append((time, item))
        if self._ends and self._ends[-1] - (self._ends[-2] if len(self._ends) > 1 else 0) < BLOCK:
            self._ends[-1] += 1
        else:
            self._ends.append(len(self._rows))

    def _begin(self) -> int:
        return self._ends[self._gone - 1] if self._gone else 0

    def expected(self, before_s: int, limit: int) -> View:
        shown = [row for row in self._rows[-KEEP:] if row[0] < before_s]
        newest = shown[len(shown) - min(limit, len(shown)) :]
        num_total = self._went + max(len(self._rows) - KEEP, 0) + len(shown) if shown else 0
        return [item for _, item in newest], [time for time, _ in newest], num_total

    def reply(self, before: int, limit: int, keep: int, size: int, page: int, epoch: int, below: int) -> list[Any]:
        total = len(self._rows) - self._begin()
        if below and epoch != self.epoch:
            return [0, 0, b"", 0, [], 0, 0, -1, 0]
        number = below - 1 if below else len(self._ends)
        later = found = taken = 0
        blocks: list[bytes] = []
        done = False
        while number > self._gone and not done and taken < page:
            rows = self._rows[self._ends[number - 2] if number > 1 else 0 : self._ends[number - 1]]
            if rows[0][0] >= before:
                later += len(rows)
            elif rows[-1][0] >= before or found < limit:
                records = np.zeros(len(rows), RECORD)
                records["timestamp_s"], records["item"] = zip(*rows, strict=True)
                blocks += encode_blocks(records, 512)
                taken += len(rows)
                found += len(rows) if rows[-1][0] < before else 0
                done = found >= limit
            else:
                done = True
            number -= 1
        more = number + 1 if number > self._gone and not done else 0
        gone, went = self._gone, self._went + self._begin()
        return [total, later, b"".join(reversed(blocks)), found, [], gone, self.epoch, more, went]


async def _read_from_fake(before: list[Step], between: list[Step], before_s: int, limit: int) -> None:
    store = BlockStore()
    writer = Writer(store)
    for step in before:
        await writer.step(step)
    read = HistoryRead(before_s, limit, KEEP, PAGE, RESTARTS)
    steps = iter(between)
    expected: View | None = None
    while not read.done:
        arguments = read.arguments(BLOCK)
        if arguments[-1] == 0:  # the first trip of all, or of a read that begins anew
            expected = store.expected(before_s, limit)
        reply = store.reply(*arguments)
        read.take(reply, decode_blocks([reply[2]]), 0)
        await writer.step(next(steps, ("nothing", 0)))
    assert read.num_restarts <= RESTARTS + 1
    assert read.num_trips <= (RESTARTS + 1) * (KEEP + BLOCK) + 1
    assert view(read.history()) == expected


@given(before=STEPS, between=STEPS, before_s=st.sampled_from((5, 12, 25, LATER)), limit=st.sampled_from((0, 3, 11, 99)))
@example(before=[("new", 9)] * 3, between=[("new", 9)] * 9, before_s=LATER, limit=99)  # cut under it, again and again
@example(before=[("new", 9)] * 3, between=[("late", 20), ("new", 9)], before_s=LATER, limit=99)
@settings(deadline=None)
def test_a_read_in_trips_is_the_log_as_it_was_in_the_first(
    before: list[Step], between: list[Step], before_s: int, limit: int
) -> None:
    asyncio.run(_read_from_fake(before, between, before_s, limit))


class InterruptedClient:
    """A client that lets something else happen before it sends each of its pipelines.

    Args:
        client: The real one.
        between: What happens.
    """

    def __init__(self, client: StoreClient, between: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._between = between
        self.replies: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pipeline(self, transaction: bool) -> Any:
        pipe: Any = self._client.pipeline(transaction=transaction)
        execute = pipe.execute

        async def interrupted(raise_on_error: bool) -> list[Any]:
            await self._between()
            self.replies.append(await execute(raise_on_error=raise_on_error))
            return self.replies[-1]

        pipe.execute = interrupted
        return pipe


def small(namespace: str, **changes: int) -> UserLogConfig:
    limits = {"max_events": KEEP, "block_events": BLOCK, "read_events_max": PAGE, "read_restarts_max": RESTARTS}
    return UserLogConfig.model_validate({"namespace": namespace, "timeout_ms": 5_000, **limits, **changes})


async def _read_from_server(url: str, before: list[Step], between: list[Step]) -> None:
    client = connect(StoreConfig(url=url))
    real, model = RedisUserLog(client, small("paged")), MemoryUserLog(KEEP)
    try:
        await real.delete(1)
        writer = Writer(real, model)
        for step in before:
            await writer.step(step)
        for before_s, limit in ((12, 7), (LATER, 11), (LATER, 99)):
            steps = iter(between)
            seen: list[View] = []

            async def interrupt(
                steps: Iterator[Step] = steps, seen: list[View] = seen, query: tuple[int, int] = (before_s, limit)
            ) -> None:
                await writer.step(next(steps, ("nothing", 0)))
                seen.append(view(await model.read(1, *query)))

            interrupted: Any = InterruptedClient(client, interrupt)
            found = view(await RedisUserLog(interrupted, small("paged")).read(1, before_s, limit))
            assert found in seen
    finally:
        await client.aclose()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(before=STEPS, between=STEPS)
@example(before=[("new", 9)] * 3, between=[("nothing", 0), *[("new", 9)] * 9])
@example(before=[("new", 9)] * 3, between=[("nothing", 0), ("late", 3), ("delete", 0), ("new", 9), ("late", 2)])
def test_whatever_is_written_between_trips_what_is_read_was_once_there(
    server: EmbeddedStore, runner: asyncio.Runner, before: list[Step], between: list[Step]
) -> None:
    runner.run(_read_from_server(server.url, before, between))


async def _counted(
    client: StoreClient, config: UserLogConfig, between: Callable[[int], Awaitable[object]], limit: int = 99
) -> tuple[UserHistory, int]:
    trip = itertools.count()

    async def interrupt() -> None:
        await between(next(trip))

    interrupted: Any = InterruptedClient(client, interrupt)
    history = await RedisUserLog(interrupted, config).read(1, LATER, limit)
    return history, len(interrupted.replies)


async def _filled(client: StoreClient, namespace: str, event: MakeEvent) -> RedisUserLog:
    log = RedisUserLog(client, small(namespace))
    await log.append([event(f"e{n}", n, item=n) for n in range(KEEP)])
    await log.read(1, LATER, 1)  # the first read of a server is sent twice: it does not know the script yet
    return log


async def test_a_long_history_takes_several_trips(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    await _filled(client, namespace, event)

    async def nothing(trip: int) -> None:
        pass

    history, num_trips = await _counted(client, small(namespace), nothing)
    assert history.item_keys.tolist() == list(range(KEEP))
    assert num_trips == 4  # 7 blocks, the newest of 2 events: 2 + 3, then 3 + 3 twice, 3
    for column in (history.item_keys, history.weights, history.timestamps_s, history.sources):
        assert column is not None
        assert column.base is None  # a history does not hold the replies
    for limit, num_expected in ((5, 1), (6, 2), (8, 2), (11, 2), (12, 3)):  # no trip for more than is still wanted
        history, num_trips = await _counted(client, small(namespace), nothing, limit)
        assert (history.item_keys.tolist(), num_trips) == (list(range(KEEP))[-limit:], num_expected)
    _, num_trips = await _counted(client, small(namespace, read_events_max=KEEP), nothing)
    assert num_trips == 1


async def test_newer_events_do_not_disturb_a_read(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    await _filled(client, namespace, event)
    log = RedisUserLog(client, small(namespace, max_events=99))

    async def append(trip: int) -> None:
        if trip:
            await log.append([event(f"n{trip}", 100 + trip)])

    history, num_trips = await _counted(client, small(namespace, max_events=99), append)
    assert history.item_keys.tolist() == list(range(KEEP))
    assert (history.num_total, num_trips) == (KEEP, 4)


async def test_a_late_event_makes_a_read_begin_anew(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    log = await _filled(client, namespace, event)

    async def append(trip: int) -> None:
        if trip == 2:
            await log.append([event("late", 15, item=99)])

    history, num_trips = await _counted(client, small(namespace), append)
    assert history.item_keys.tolist() == [*range(1, 16), 99, *range(16, KEEP)]
    assert num_trips > 4


async def test_a_log_that_is_made_again_is_another(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    log = await _filled(client, namespace, event)

    async def replace(trip: int) -> None:
        if trip == 1:
            await log.delete(1)
            await log.load_many([UserLoad(1, np.arange(50, 70), np.ones(20, np.float32), np.arange(20), np.arange(20))])

    history, _ = await _counted(client, small(namespace), replace)
    assert history.item_keys.tolist() == list(range(50, 70))

    async def delete(trip: int) -> None:
        if trip == 1:
            await log.delete(1)

    history, _ = await _counted(client, small(namespace), delete)
    assert (len(history), history.num_total) == (0, 0)


async def test_a_log_that_never_rests_is_read_in_one_trip(
    client: StoreClient, namespace: str, event: MakeEvent
) -> None:
    log = await _filled(client, namespace, event)

    async def append(trip: int) -> None:
        await log.append([event(f"late{trip}", 15, item=100 + trip)])

    history, num_trips = await _counted(client, small(namespace), append)
    assert len(history) == KEEP
    assert num_trips == 2 * (RESTARTS + 1) + 1


async def test_a_log_without_an_epoch_is_read_in_one_trip(
    client: StoreClient, namespace: str, event: MakeEvent
) -> None:
    """A process of a release that knows of none still writes."""
    log = await _filled(client, namespace, event)
    raw: Any = client

    async def write_as_before(trip: int) -> None:
        await raw.lset(f"{namespace}:{{i1}}:log2", 0, struct.pack("<BI", 2, KEEP))

    history, num_trips = await _counted(client, small(namespace), write_as_before)
    assert history.item_keys.tolist() == list(range(KEEP))
    assert num_trips == 1
    assert await log.append([event("new", 99, item=99)]) == AppendResult(appended=1)
    assert (await log.read(1, LATER, 99)).item_keys.tolist() == [*range(1, KEEP), 99]


async def test_a_log_of_a_release_that_did_not_count_what_went_is_counted_on(
    client: StoreClient, namespace: str, event: MakeEvent
) -> None:
    log = await _filled(client, namespace, event)
    raw: Any = client
    key = f"{namespace}:{{i1}}:log2"
    meta = await raw.lindex(key, 0)
    await raw.lset(key, 0, meta[:17])
    assert (await log.read(1, LATER, 99)).num_total == KEEP
    await log.append([event(f"n{n}", 100 + n) for n in range(10)])
    assert (await log.read(1, LATER, 99)).num_total == KEEP + 10
    assert len(await raw.lindex(key, 0)) == 25


async def test_many_histories_of_different_length(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    log = RedisUserLog(client, small(namespace))
    await log.append(
        [event(f"e{n}", n, user=user, item=100 * user + n) for user in range(1, 9) for n in range(user * 2)]
    )
    queries = [HistoryQuery(user, LATER) for user in (8, 1, 99, 5, 8, 3)]
    histories = await log.read_many(queries, 9)
    for query, history in zip(queries, histories, strict=True):
        user = int(query.user)
        num = user * 2 if user < 9 else 0
        assert history.item_keys.tolist() == [100 * user + n for n in range(max(num - 9, 0), num)]
        assert history.num_total == num


async def test_no_reply_is_longer_than_a_trip_may_be(client: StoreClient, namespace: str, event: MakeEvent) -> None:
    await _filled(client, namespace, event)

    async def nothing() -> None:
        pass

    interrupted: Any = InterruptedClient(client, nothing)
    for limit in (1, PAGE, PAGE + 1, KEEP, 99):
        await RedisUserLog(interrupted, small(namespace)).read(1, LATER, limit)
    strings = [msgpack.unpackb(reply, raw=True)[2] for (reply,) in interrupted.replies]
    lengths = np.diff(decode_blocks(strings).offsets)
    assert lengths.max() < PAGE + BLOCK
    assert lengths.min() > 0


@pytest.mark.parametrize("num_events", [4, 5, 6, 11, 60])
async def test_many_events_of_one_user_are_appended_in_steps(
    client: StoreClient, namespace: str, event: MakeEvent, num_events: int
) -> None:
    """The same log and counts as in one step, in time order; sent again they change nothing."""
    order = np.random.default_rng(num_events).permutation(num_events).tolist()
    events = [event(f"e{n}", n, item=n) for n in order] + [event("other", 1, user=2)]
    model = MemoryUserLog(KEEP)
    expected = await model.append(events)

    async def nothing() -> None:
        pass

    interrupted: Any = InterruptedClient(client, nothing)
    log = RedisUserLog(interrupted, small(namespace, append_events_max=5))
    await log.append([event("first", 0, user=3)])  # the script is there
    interrupted.replies.clear()
    assert await log.append(events) == expected
    assert len(interrupted.replies) == -(-min(num_events, KEEP) // 5)
    assert view(await log.read(1, LATER, 99)) == view(await model.read(1, LATER, 99))
    assert (await log.append(events)).appended == 0
    load = UserLoad(1, np.array(order), np.ones(num_events, np.float32), np.array(order), [f"e{n}" for n in order])
    assert (await log.load_many([load])).appended == 0
    assert view(await log.read(1, LATER, 99)) == view(await model.read(1, LATER, 99))
