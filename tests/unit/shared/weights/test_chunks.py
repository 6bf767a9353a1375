"""Disk cache, chain and peers: N replicas cost one read of the origin, and no bad byte passes."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from shared.clock import ManualClock
from shared.errors import InvalidRequestError, OverloadedError, WeightsError
from shared.handle import Handle, LocalHandle
from shared.weights import LoadConfig, ParallelLoader, WeightStore
from shared.weights.chunks import ChainSource, ChunkRequest, ChunkSource, DiskCache, OriginSource
from shared.weights.errors import ChunkError
from shared.weights.manifest import CHUNK_BYTES_MAX, Chunk
from shared.weights.peers import PeerCache, PeerConfig, PeerSource
from tests.helpers.faulty_store import FaultyStore

CHUNK = 1000


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def origin() -> Iterator[WeightStore]:
    """A version ``v`` of small chunks in an object store."""
    url = f"memory://{uuid.uuid4().hex}/weights"
    store = WeightStore(url, clock=ManualClock())
    with store.writer("v", chunk_bytes=CHUNK) as writer:
        writer.add_tensors("tables/user", {"weight": np.random.default_rng(5).random((2000, 4), np.float32)})
        writer.commit()
    yield store
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(root, recursive=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def request_of(data: bytes, name: str = "a") -> ChunkRequest:
    return ChunkRequest("v", name, len(data), Chunk(0, 0, len(data), hashlib.sha256(data).hexdigest()))


class Fixed:
    """A source that gives what it was told to, when it is let."""

    def __init__(self, name: str, answer: bytes | WeightsError | None) -> None:
        self.name = name
        self.answer = answer
        self.num_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, wanted: ChunkRequest) -> bytes | None:
        self.num_asked += 1
        await self.gate.wait()
        if isinstance(self.answer, WeightsError):
            raise self.answer
        return self.answer


async def test_the_disk_cache_keeps_by_content_and_evicts_the_oldest_use(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    cache = DiskCache(tmp_path, 25, executor)
    first, second, third = (bytes([number]) * 10 for number in range(3))
    await cache.keep(request_of(first), first)
    await cache.keep(request_of(second), second)
    assert await cache.fetch(request_of(first, name="of/another/file")) == first
    await cache.keep(request_of(third), third)
    assert await cache.fetch(request_of(second)) is None
    assert await cache.fetch(request_of(first)) == first
    assert cache.bytes_held == 20
    assert len(names(tmp_path)) == 2


async def test_the_disk_cache_outlives_its_process(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    data = b"x" * 10
    await DiskCache(tmp_path, 100, executor).keep(request_of(data), data)
    (tmp_path / "notes.txt").write_text("not a chunk")
    again = DiskCache(tmp_path, 100, executor)
    assert again.bytes_held == 10
    assert await again.fetch(request_of(data)) == data


async def test_a_chunk_that_does_not_fit_the_cache_is_not_kept(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    for size, kept in ((9, True), (10, True), (11, False)):
        cache, data = DiskCache(tmp_path / str(size), 10, executor), b"x" * size
        await cache.keep(request_of(data), data)
        assert (await cache.fetch(request_of(data)) == data) is kept
    with pytest.raises(ValueError, match="at least 1"):
        DiskCache(tmp_path, 0, executor)


async def test_a_chunk_that_went_bad_in_the_cache_is_a_miss_and_goes(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    cache, data = DiskCache(tmp_path, 100, executor), b"x" * 10
    wanted = request_of(data)
    for bad in (b"y" * 10, b"x" * 9, b""):
        await cache.keep(wanted, data)
        (tmp_path / wanted.chunk.sha256).write_bytes(bad)
        assert await cache.fetch(wanted) is None
        assert names(tmp_path) == []
    assert cache.bytes_held == 0


async def test_a_full_disk_costs_no_load(
    tmp_path: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = DiskCache(tmp_path, 100, executor), b"x" * 10

    def refuse(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    await cache.keep(request_of(data), data)
    assert await cache.fetch(request_of(data)) is None


async def test_a_chain_asks_in_order_and_stops_at_the_first() -> None:
    data = b"right"
    near, middle, far = Fixed("near", None), Fixed("middle", data), Fixed("far", data)
    chain = ChainSource([near, middle, far])
    assert await chain.fetch(request_of(data)) == data
    assert (near.num_asked, middle.num_asked, far.num_asked) == (1, 1, 0)
    assert chain.bytes_by_source == {"middle": 5}
    with pytest.raises(ValueError, match="at least one"):
        ChainSource([])


async def test_a_chain_goes_on_after_a_failure_and_reports_the_last() -> None:
    data = b"right"
    wanted = request_of(data)
    bad = Fixed("bad", wanted.error("is wrong", "x", "y"))
    assert await ChainSource([bad, Fixed("good", data)]).fetch(wanted) == data
    with pytest.raises(ChunkError, match="is wrong"):
        await ChainSource([bad, Fixed("empty", None)]).fetch(wanted)
    with pytest.raises(WeightsError, match="chunk 0 is nowhere to be had"):
        await ChainSource([Fixed("empty", None)]).fetch(wanted)


async def test_who_asks_at_the_same_time_shares_one_flight() -> None:
    data = b"right"
    source = Fixed("slow", data)
    source.gate.clear()
    chain = ChainSource([source])
    asking = [asyncio.create_task(chain.fetch(request_of(data))) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()  # the one that started it gives up
    await asyncio.sleep(0)
    source.gate.set()
    assert set(await asyncio.gather(*asking[1:])) == {data}
    assert source.num_asked == 1
    await chain.fetch(request_of(data))
    assert source.num_asked == 2, "a flight that landed is over"


class Node:
    """One node of a mesh: disk, origin, and the peer cache in front of them."""

    def __init__(self, name: str, store: WeightStore, fs: FaultyStore, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.origin = OriginSource(fs, store.root, pool)
        self.cache = DiskCache(folder / f"{name}-chunks", 10**9, pool)
        self.service = PeerCache(ChainSource([self.cache, self.origin], self.cache), PeerConfig())
        self.handle: Handle = LocalHandle(name, self.service)
        self.folder = folder / name
        self.pool = pool

    def loader(self, peers: list[Handle]) -> ParallelLoader:
        sources: list[ChunkSource] = [self.cache, PeerSource(peers, PeerConfig(timeout_s=5)), self.origin]
        return ParallelLoader(ChainSource(sources, self.cache), self.folder, self.pool, LoadConfig(backoff_s=0))


def mesh(origin: WeightStore, tmp_path: Path, pool: ThreadPoolExecutor) -> tuple[FaultyStore, list[Node]]:
    fs = FaultyStore(origin.fs)
    return fs, [Node(f"node-{number}", origin, fs, tmp_path, pool) for number in range(4)]


async def test_four_nodes_that_load_at_once_cost_one_origin_read(
    origin: WeightStore, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    fs, nodes = mesh(origin, tmp_path, executor)
    manifest, peers = origin.open("v").manifest, [node.handle for node in nodes]
    for reader in await asyncio.gather(*(node.loader(peers).load(manifest) for node in nodes)):
        reader.verify()
    assert fs.bytes_read == sum(entry.bytes for entry in manifest.entries())
    assert set(fs.reads.values()) == {1}
    assert all(node.service.status()["given"] > 0 for node in nodes), "every node owns a part"


async def test_a_dead_peer_costs_its_share_again_and_nothing_else(
    origin: WeightStore, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    fs, nodes = mesh(origin, tmp_path, executor)
    manifest = origin.open("v").manifest
    gone = LocalHandle("node-0", object())  # has no method of that name: each call fails
    peers: list[Handle] = [gone, *(node.handle for node in nodes[1:])]
    for reader in await asyncio.gather(*(node.loader(peers).load(manifest) for node in nodes[1:])):
        reader.verify()
    assert fs.bytes_read == manifest.entries()[0].bytes, "the next peer of the order stands in"


async def test_without_any_peer_the_origin_serves(
    origin: WeightStore, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    fs, nodes = mesh(origin, tmp_path, executor)
    manifest = origin.open("v").manifest
    peers: list[Handle] = [LocalHandle(f"gone-{number}", object()) for number in range(3)]
    (await nodes[0].loader(peers).load(manifest)).verify()
    assert fs.bytes_read == manifest.entries()[0].bytes


async def test_a_peer_that_lies_is_passed_over(
    origin: WeightStore, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    class Liar:
        async def chunk(self, wanted: ChunkRequest) -> bytes:
            return b"\0" * wanted.chunk.length

    fs, nodes = mesh(origin, tmp_path, executor)
    manifest = origin.open("v").manifest
    (await nodes[0].loader([LocalHandle("liar", Liar())]).load(manifest)).verify()
    assert fs.bytes_read == manifest.entries()[0].bytes


async def test_a_peer_that_hangs_is_given_up_in_time() -> None:
    class Hanging:
        async def chunk(self, wanted: ChunkRequest) -> bytes:
            await asyncio.Event().wait()
            return b""

    peers = PeerSource([LocalHandle("hanging", Hanging())], PeerConfig(timeout_s=0.01))
    assert await peers.fetch(request_of(b"x")) is None
    assert peers.num_failed == 1


def test_every_process_orders_the_peers_of_a_chunk_alike() -> None:
    handles: list[Handle] = [LocalHandle(f"node-{number}", object()) for number in range(5)]
    first, turned = PeerSource(handles, PeerConfig()), PeerSource(handles[::-1], PeerConfig())
    owners = set()
    for number in range(100):
        sha256 = hashlib.sha256(bytes([number])).hexdigest()
        order = [peer.name for peer in first.order(sha256)]
        assert order == [peer.name for peer in turned.order(sha256)]
        without_owner = PeerSource([peer for peer in handles if peer.name != order[0]], PeerConfig())
        assert [peer.name for peer in without_owner.order(sha256)] == order[1:], "only the lost peer's chunks move"
        owners.add(order[0])
    assert len(owners) == 5


async def test_a_peer_refuses_what_is_no_chunk_and_what_is_too_much() -> None:
    source = Fixed("slow", b"right")
    peer = PeerCache(source, PeerConfig(calls_max=1, waiting_max=1))
    good = request_of(b"right")
    wrong: list[dict[str, Any]] = [
        {"path": "../secret"},
        {"version": ".."},
        {"chunk": Chunk(0, -1, 5, "0" * 64)},
        {"chunk": Chunk(0, 1, 5, "0" * 64)},
        {"chunk": Chunk(0, 0, 0, "0" * 64)},
        {"chunk": Chunk(0, 0, CHUNK_BYTES_MAX + 1, "0" * 64), "file_bytes": 2**40},
        {"chunk": Chunk(0, 0, 5, "../x")},
    ]
    fields = {"version": good.version, "path": good.path, "file_bytes": good.file_bytes, "chunk": good.chunk}
    for change in wrong:
        with pytest.raises(InvalidRequestError):
            await peer.chunk(ChunkRequest(**{**fields, **change}))
    assert source.num_asked == 0
    source.gate.clear()
    waiting = [asyncio.create_task(peer.chunk(good)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="holds 2 calls, limit 2"):
        await peer.chunk(good)
    source.gate.set()
    assert await asyncio.gather(*waiting) == [b"right", b"right"]
    assert peer.status() == {"given": 2, "given_bytes": 10, "failed": 0, "held": 0}
    source.answer = None
    with pytest.raises(ChunkError, match="no source of this peer has it"):
        await peer.chunk(good)


def test_requests_travel_between_processes() -> None:
    wanted = request_of(b"x")
    assert pickle.loads(pickle.dumps(wanted)) == wanted
