"""Benchmark ``userlog``: what histories cost in the store, how long a read takes, and what a hot user does to others.

The events of the data set's users go into an embedded store of the benchmark's own, as a mesh loads them. Bytes are
those of the stored blocks. Beside them stand the same events as JSON rows and as records of fixed size, and the number
of events that training rows would hold if each carried the newest ``REPLICATED_LENGTH`` before it, over the number that
the log holds.

Other users are read at a fixed pace, in turns: alone, beside a hot user of 10,000 events, who is read whole and brings
an event 50 times a second at most, and beside somebody who reads the histories of 256 users at once as often. Compared
is the p99 of all their reads, and that of each round, of which the median counts.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from benchmarks.harness import measure, quantiles, turns
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from cluster.histories import user_loads
from shared.clock import SystemClock
from shared.schema.api import Event
from shared.settings import load_settings
from shared.userlog import (
    EmbeddedStore,
    EmbeddedStoreConfig,
    HistoryQuery,
    RedisUserLog,
    StoreConfig,
    UserLoad,
    UserLog,
    UserLogConfig,
    connect,
)
from shared.userlog.client import StoreClient
from shared.userlog.records import RECORD_BYTES
from training.data import Dataset, load_dataset

LENGTHS = (50, 200, 2_048)
REPLICATED_LENGTH = 50
"""Events a row would carry if rows held their histories: what the quick ranker reads."""

HOT_EVENTS = 10_000
LONG_EVENTS = 4_096
MANY = 256
LONG_USER, HOT_USER = 2 * 10**9, 3 * 10**9

NUM_READS, QUICK_READS = 120, 30
NUM_ROUNDS, QUICK_ROUNDS = 10, 1
STRETCH_READS, QUICK_STRETCH = 400, 60
READS_PER_S = 200.0
QUICK_USERS = 200

JSON_EVERY = 10
"""Every so many users' events are written as JSON to weigh them."""

PACED_LENGTH = 200

PAUSE_S = 0.02
"""Between two calls of what others are read beside: 50 a second of one user are a flood."""

LATER_S = 2**40


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Load, weigh, read and disturb."""
    dataset = load_dataset("ml-1m", load_settings().data_dir, synthetic_fallback=True)
    config = UserLogConfig(namespace="bench", max_events=HOT_EVENTS, timeout_ms=30_000)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedStore(Path(folder) / "store", EmbeddedStoreConfig(die_with_parent=True)) as store,
    ):
        measurements = asyncio.run(_run(dataset, config, store.url, options))
    return BenchmarkReport(tuple(measurements), config.digest())


async def _run(dataset: Dataset, config: UserLogConfig, url: str, options: BenchmarkOptions) -> list[Measurement]:
    client = connect(StoreConfig(url=url))
    log = RedisUserLog(client, config)
    try:
        until_s = dataset.split.test_start_s
        loads = list(user_loads(dataset, until_s, config.max_events, config.sources))
        loads = [load for load in loads if len(load)][: QUICK_USERS if options.quick else None]
        clock = SystemClock()
        before = await _stored_bytes(client)
        begin_s = clock.monotonic_s()
        await log.load_many(loads)
        load_s = clock.monotonic_s() - begin_s
        num_events = sum(len(load) for load in loads)
        params: dict[str, Param] = {
            "dataset": dataset.name,
            "users": len(loads),
            "events": num_events,
            "quick": options.quick,
        }
        found = await _storage(client, config, dataset, loads, await _stored_bytes(client) - before, params)
        found.append(Measurement("load_s", round(load_s, 3), "s", {}, 1, params))
        await log.load_many([_long(LONG_USER, LONG_EVENTS), _long(HOT_USER, HOT_EVENTS)])
        users = [int(load.user) for load in loads]
        found += await _reads(log, users, options, params)
        found += await _beside(log, connect(StoreConfig(url=url)), config, users, options, params)
        return found
    finally:
        await client.aclose()


async def _storage(
    client: StoreClient,
    config: UserLogConfig,
    dataset: Dataset,
    loads: Sequence[UserLoad],
    memory_bytes: int,
    params: dict[str, Param],
) -> list[Measurement]:
    num_bytes = 0
    for load in loads:
        elements = await client.lrange(f"{config.namespace}:{{i{load.user}}}:log2", 0, -1)
        num_bytes += sum(len(element) for element in elements)
    num_events = sum(len(load) for load in loads)
    bytes_per_event = num_bytes / num_events
    rows = dataset.split.train
    earlier = dataset.log.second_start[rows.event_position] - dataset.log.user_offsets[rows.user_index]
    copies = int(np.minimum(earlier, REPLICATED_LENGTH).sum())
    logged = int((dataset.log.timestamp_s <= rows.timestamp_s[-1]).sum())
    replicated: dict[str, Param] = {**params, "rows": len(rows), "length": REPLICATED_LENGTH, "copied_events": copies}
    sampled = loads[::JSON_EVERY]
    json_bytes = _json_bytes(sampled) / sum(len(load) for load in sampled)
    return [
        Measurement("bytes_per_event", round(bytes_per_event, 3), "B", {}, num_events, params),
        Measurement("memory_bytes_per_event", round(memory_bytes / num_events, 3), "B", {}, num_events, params),
        Measurement("bytes_ratio_json", round(json_bytes / bytes_per_event, 2), "x", {}, num_events, params),
        Measurement("bytes_ratio_records", round(RECORD_BYTES / bytes_per_event, 2), "x", {}, num_events, params),
        Measurement("storage_ratio_replicated", round(copies / logged, 2), "x", {}, len(rows), replicated),
    ]


def _json_bytes(loads: Sequence[UserLoad]) -> int:
    """Return the bytes of the loads' events as JSON lines, one event each as ``POST /v1/events`` takes it."""
    total = 0
    for load in loads:
        columns = zip(load.event_ids, load.item_keys, load.weights, load.timestamps_s, strict=True)
        for event, item, weight, time in columns:
            row = {
                "event_id": str(event),
                "user_id": load.user,
                "item_id": int(item),
                "weight": float(weight),
                "timestamp_s": int(time),
            }
            total += len(orjson.dumps(row)) + 1
    return total


async def _reads(
    log: UserLog, users: Sequence[int], options: BenchmarkOptions, params: dict[str, Param]
) -> list[Measurement]:
    """Time single reads of each length from the user with a long history, and a read of many users, in turns."""
    rng = np.random.default_rng(options.seed)

    async def many() -> object:
        chosen = rng.choice(users, MANY).tolist()
        return await log.read_many([HistoryQuery(user, LATER_S) for user in chosen], 50)

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        f"read_ms_{length}": partial(log.read, LONG_USER, LATER_S, length) for length in LENGTHS
    }
    calls[f"read_ms_{MANY}_users"] = many
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = SystemClock()
    for turn in turns(list(calls), QUICK_READS if options.quick else NUM_READS, 3, options.seed):
        begin_s = clock.monotonic_s()
        await calls[turn.variant]()
        if turn.counts:
            samples[turn.variant].append((clock.monotonic_s() - begin_s) * 1e3)
    return [measure(name, values, "p50", "ms", **params) for name, values in samples.items()]


async def _beside(
    log: UserLog,
    client: StoreClient,
    config: UserLogConfig,
    users: Sequence[int],
    options: BenchmarkOptions,
    params: dict[str, Param],
) -> list[Measurement]:
    """Read other users at a fixed pace, in turns alone, beside a hot user, and beside reads of many users at once."""
    other = RedisUserLog(client, config)
    rng = np.random.default_rng(options.seed)
    works: dict[str, Callable[[int], Awaitable[None]] | None] = {
        "alone": None,
        "hot_user": partial(_read_hot, other),
        "many_users": partial(_read_many, other, users, rng),
    }
    samples: dict[str, list[float]] = {name: [] for name in works}
    p99_by_round: dict[str, list[float]] = {name: [] for name in works}
    num_calls = dict.fromkeys(works, 0)
    try:
        for turn in turns(list(works), QUICK_ROUNDS if options.quick else NUM_ROUNDS, 1, options.seed):
            stop = asyncio.Event()
            work = works[turn.variant]
            task = asyncio.create_task(_keep_on(work, stop)) if work is not None else None
            found = await _paced(log, rng.choice(users, QUICK_STRETCH if options.quick else STRETCH_READS).tolist())
            stop.set()
            num_calls[turn.variant] += await task if task is not None else 0
            if turn.counts:
                samples[turn.variant] += found
                p99_by_round[turn.variant].append(quantiles(found)["p99"])
    finally:
        await client.aclose()
    of_all: dict[str, Param] = {**params, "pause_ms": PAUSE_S * 1e3, "reads_per_s": READS_PER_S}
    sizes: dict[str, dict[str, Param]] = {"hot_user": {"hot_events": HOT_EVENTS}, "many_users": {"users_at_once": MANY}}
    alone = quantiles(samples["alone"])["p99"]
    result = [measure("read_ms_alone", samples["alone"], "p99", "ms", **of_all)]
    for name, size in sizes.items():
        all_params = {**of_all, **size, "calls": num_calls[name]}
        ratio = round(quantiles(samples[name])["p99"] / alone, 3)
        ratios = [one / base for one, base in zip(p99_by_round[name], p99_by_round["alone"], strict=True)]
        result += [
            Measurement(f"{name}_p99_ratio", ratio, "x", {}, 1, all_params),
            # One stall of the machine is a tail of one side above; here it is one round.
            measure(f"{name}_p99_ratio_by_round", ratios, "p50", "x", **all_params),
            measure(f"read_ms_beside_{name}", samples[name], "p99", "ms", **all_params),
        ]
    return result


async def _keep_on(work: Callable[[int], Awaitable[None]], stop: asyncio.Event) -> int:
    """Do a work over and over, with a pause between; return how often."""
    clock = SystemClock()
    calls = 0
    while not stop.is_set():
        await work(calls)
        calls += 1
        await clock.sleep_s(PAUSE_S)
    return calls


async def _read_hot(log: UserLog, number: int) -> None:
    """Read all of the hot user's events and append one."""
    await log.read(HOT_USER, LATER_S, HOT_EVENTS)
    event_id = f"hot{number}/{SystemClock().monotonic_s()}"
    await log.append([Event(event_id=event_id, user_id=HOT_USER, item_id=1, weight=1.0, timestamp_s=LATER_S - 10)])


async def _read_many(log: UserLog, users: Sequence[int], rng: np.random.Generator, number: int) -> None:
    """Read the histories of many users at once, as training does."""
    await log.read_many([HistoryQuery(user, LATER_S) for user in rng.choice(users, MANY).tolist()], PACED_LENGTH)


async def _paced(log: UserLog, users: Sequence[int]) -> list[float]:
    """Read users at a fixed pace; return milliseconds from the moment each read was due."""
    clock = SystemClock()
    begin_s = clock.monotonic_s()

    async def one(user: int, due_s: float) -> float:
        await clock.sleep_s(max(due_s - clock.monotonic_s(), 0.0))
        await log.read(user, LATER_S, PACED_LENGTH)
        return (clock.monotonic_s() - due_s) * 1e3

    due = [begin_s + number / READS_PER_S for number in range(len(users))]
    return list(await asyncio.gather(*(one(user, at) for user, at in zip(users, due, strict=True))))


def _long(user: int, num_events: int) -> UserLoad:
    """Make a long history: an event a minute, of few thousand items."""
    rng = np.random.default_rng(user)
    return UserLoad(
        user=user,
        item_keys=rng.integers(1, 4_000, num_events),
        weights=rng.integers(1, 6, num_events).astype(np.float32),
        timestamps_s=1_000_000_000 + 60 * np.arange(num_events),
        event_ids=np.arange(num_events),
    )


async def _stored_bytes(client: StoreClient) -> int:
    info = await client.info("memory")
    return int(info["used_memory"])
