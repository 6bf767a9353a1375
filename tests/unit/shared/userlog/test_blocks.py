"""The format in the store: what the store encodes, numpy decodes; what is no block is refused, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import StoreUnavailableError
from shared.schema.api import TIMESTAMP_MAX_S
from shared.userlog import UserLoad
from shared.userlog.blocks import HEADER_BYTES, decode_blocks
from shared.userlog.client import StoreClient
from shared.userlog.redis_log import RedisUserLog, UserLogConfig

ONE_BLOCK = (
    bytes.fromhex("02000300")  # version, source, three events
    + (1_000).to_bytes(8, "little")
    + (1_300).to_bytes(8, "little")
    + bytes.fromhex("0300 0400 0300 0300")  # bytes of times, items, weights and sources
    + bytes(18)  # ids
    + bytes.fromhex("00 ac02")  # 0 and 300 seconds later
    + bytes.fromhex("07 ac02 09")  # items 7, 300, 9
    + bytes.fromhex("12 10 01")  # weights 4.5, 4.0, and the float whose bits are 0
    + bytes.fromhex("00 03 00")  # sources
)


def test_a_block_by_hand() -> None:
    """It is on disk: another layout needs another version."""
    columns = decode_blocks([ONE_BLOCK, b"", ONE_BLOCK + ONE_BLOCK])
    assert columns.timestamps_s.tolist() == [1_000, 1_000, 1_300] * 3
    assert columns.item_keys.tolist() == [7, 300, 9] * 3
    assert columns.weights.tolist() == [4.5, 4.0, 0.0] * 3
    assert columns.sources.tolist() == [0, 3, 0] * 3
    assert columns.offsets.tolist() == [0, 3, 3, 9]


@given(at=st.integers(0, len(ONE_BLOCK) - 1), value=st.integers(0, 255), cut=st.integers(0, len(ONE_BLOCK)))
def test_damage_gives_events_or_a_store_error(at: int, value: int, cut: int) -> None:
    damaged = bytearray(ONE_BLOCK)
    damaged[at] = value
    for string in (bytes(damaged), ONE_BLOCK[:cut], bytes(damaged)[:cut] + ONE_BLOCK):
        try:
            columns = decode_blocks([string])
        except StoreUnavailableError:
            continue
        assert len(columns.timestamps_s) == len(columns.item_keys) == len(columns.weights) == columns.offsets[-1]


@pytest.mark.parametrize("cut", [1, HEADER_BYTES - 1, HEADER_BYTES, len(ONE_BLOCK) - 1])
def test_a_block_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(StoreUnavailableError, match="damaged"):
        decode_blocks([ONE_BLOCK[:cut]])


async def test_every_value_survives_the_store(client: StoreClient, namespace: str) -> None:
    random = np.random.default_rng(3)
    items = np.concatenate([2 ** np.arange(63), 2 ** np.arange(63) - 1, -(2 ** np.arange(63)), [-(2**63), -1]])
    num = len(items)
    bits = random.integers(0, 2**32, num, dtype=np.uint64).astype(np.uint32)
    weights = np.where(random.random(num) < 0.5, bits.view(np.float32), np.arange(num, dtype=np.float32) / 2)
    weights = np.nan_to_num(weights, nan=1.25).astype(np.float32)
    times = np.sort(np.concatenate([random.integers(0, TIMESTAMP_MAX_S, num - 4), [0, 0, 127, TIMESTAMP_MAX_S]]))
    log = RedisUserLog(client, UserLogConfig(namespace=namespace, block_events=10, timeout_ms=5_000))
    sources = random.integers(0, 256, num).astype(np.uint8)
    await log.load_many([UserLoad(1, items, weights, times, np.arange(num), sources=sources)])
    history = await log.read(1, 2**62, 1_000)
    assert history.item_keys.tolist() == items.tolist()
    assert history.weights.tobytes() == weights.tobytes()
    assert history.timestamps_s.tolist() == times.tolist()
    assert history.sources is not None
    assert history.sources.tolist() == sources.tolist()
    for column in (history.item_keys, history.weights, history.timestamps_s, history.sources):
        assert column.base is None  # a small history does not hold a large reply


async def test_the_store_and_numpy_encode_alike(client: StoreClient, namespace: str) -> None:
    """A whole history is encoded here, an appended event in the store: to the same bytes."""
    random = np.random.default_rng(4)
    num = 50
    load = UserLoad(
        1,
        random.integers(-(2**63), 2**63, num) >> random.integers(0, 63, num),
        (random.integers(0, 30, num) / random.integers(1, 4, num)).astype(np.float32),
        np.sort(random.integers(0, 2**40, num) >> random.integers(0, 2, num) * 30),
        random.integers(0, 2**62, num),
        sources=np.where(np.arange(num) < 30, 2, random.integers(0, 9, num)).astype(np.uint8),
    )
    stored = []
    for name, first in (("loaded", num), ("appended", 1)):
        config = UserLogConfig(namespace=f"{namespace}.{name}", block_events=7, timeout_ms=5_000)
        log = RedisUserLog(client, config)
        for stop in range(first, num + 1):
            columns = (load.item_keys, load.weights, load.timestamps_s, load.event_ids, load.sources)
            items, weights, times, ids, sources = (np.asarray(column)[:stop] for column in columns)
            await log.load_many([UserLoad(1, items, weights, times, ids, sources=sources)])
        stored.append(await client.lrange(f"{namespace}.{name}:{{i1}}:log2", 0, -1))
    assert stored[0][1:] == stored[1][1:]
    assert stored[0][0][:9] == stored[1][0][:9]  # behind them lies a time


async def test_ids_that_differ_in_their_upper_bits_are_two_events(client: StoreClient, namespace: str) -> None:
    log = RedisUserLog(client, UserLogConfig(namespace=namespace, timeout_ms=5_000))
    ids = np.array([5, 5 + 2**48, 5 + 2**62, 6])
    result = await log.load_many([UserLoad(1, np.arange(4), np.ones(4, np.float32), np.arange(4), ids)])
    assert result.appended == 4
