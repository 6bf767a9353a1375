"""Loading a version over many streams: whole or not at all, and only what is missing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.weights import LoadConfig, LoadProgress, ParallelLoader, WeightStore, load_version
from shared.weights.chunks import ChainSource, ChunkRequest, OriginSource
from shared.weights.errors import ChunkError
from shared.weights.loader import ByteBudget, load_order
from shared.weights.manifest import Chunk, FileEntry, Manifest
from shared.weights.writer import LOADING_PREFIX
from tests.helpers.faulty_store import Fault, FaultyStore, cut, flip, reset

CHUNK = 1000
QUICK = LoadConfig(streams=4, backoff_s=0, attempts_max=3)


@pytest.fixture
def origin() -> Iterator[WeightStore]:
    """A version ``v`` of small chunks in an object store."""
    url = f"memory://{uuid.uuid4().hex}/weights"
    store = WeightStore(url, clock=ManualClock())
    rng = np.random.default_rng(5)
    with store.writer("v", chunk_bytes=CHUNK) as writer:
        writer.add_tensors("tables/user", {"weight": rng.random((200, 4), np.float32)})
        writer.add_tensors("tables/item", {"weight": rng.random((100, 4), np.float32)})
        writer.add_tensors("vocabulary", {"keys": np.arange(9)})
        writer.add_tensors("dense", {"w": rng.random((30, 30), np.float32)})
        writer.add_json("model", {"width": 4})
        writer.commit()
    yield store
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(root, recursive=True)


class Site:
    """A loader with a faulty origin."""

    def __init__(self, origin: WeightStore, root: Path, config: LoadConfig = QUICK) -> None:
        self.store = origin
        self.fs = FaultyStore(origin.fs)
        self.root = root
        self.executor = ThreadPoolExecutor(8)
        self.source = ChainSource([OriginSource(self.fs, origin.root, self.executor)])
        self.loader = ParallelLoader(self.source, root, self.executor, config)
        self.seen: list[LoadProgress] = []

    async def load(self) -> WeightStore:
        await self.loader.load(self.store.open("v").manifest, self.seen.append)
        return WeightStore(self.root)

    def num_chunks(self) -> int:
        return sum(len(entry.pieces()) for entry in self.store.open("v").manifest.entries())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(found: WeightStore, origin: WeightStore) -> None:
    left, right = found.open("v"), origin.open("v")
    left.verify()
    assert left.manifest == right.manifest
    for group in right.groups():
        for name, array in right.tensors(group).items():
            np.testing.assert_array_equal(left.tensor(group, name), array)


async def test_what_arrives_is_what_was_published(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path)
    same(await site.load(), origin)
    assert set(site.fs.reads.values()) == {1}
    assert len(site.fs.reads) == site.num_chunks() > 8
    assert site.seen[-1].bytes_done == site.seen[-1].bytes_total == site.fs.bytes_read
    assert names(tmp_path) == [".lock-v", "v"]
    await site.load()
    assert set(site.fs.reads.values()) == {1}, "a version that is here is not read again"


async def test_from_a_folder_without_ceremony(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "a")
    with store.writer("v") as writer:
        writer.add_tensors("dense", {"w": np.arange(5)})
        writer.commit()
    reader = await load_version(store, "v", tmp_path / "b")
    np.testing.assert_array_equal(reader.tensor("dense", "w"), np.arange(5))


async def test_documents_and_dense_come_first_tables_last(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path, LoadConfig(streams=1))
    await site.load()
    assert site.seen[-1].files_done == ("model.json", "dense", "vocabulary", "tables/item", "tables/user")
    dense_done = next(state for state in site.seen if "dense" in state.files_done)
    assert dense_done.bytes_done < dense_done.bytes_total / 2


@pytest.mark.parametrize("fault", [cut, flip, reset])
async def test_a_passing_fault_costs_one_more_read_of_that_chunk(
    origin: WeightStore, tmp_path: Path, fault: Fault
) -> None:
    site = Site(origin, tmp_path)
    site.fs.spoil("user.safetensors", CHUNK, fault, times=2)
    same(await site.load(), origin)
    assert site.fs.reads["user.safetensors", CHUNK] == 3
    assert sum(site.fs.reads.values()) == site.num_chunks() + 2
    assert site.seen[-1].retries == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (cut, "gave 500 bytes, the manifest says 1000 bytes"),
        (flip, r"gave bytes of SHA-256 [0-9a-f]{12}\.\.\., the manifest says [0-9a-f]{12}\.\.\."),
        (reset, "ConnectionResetError: connection reset by peer"),
    ],
)
async def test_a_lasting_fault_names_file_chunk_expected_and_found(
    origin: WeightStore, tmp_path: Path, fault: Fault, words: str
) -> None:
    site = Site(origin, tmp_path)
    site.fs.spoil("user.safetensors", 2 * CHUNK, fault)
    with pytest.raises(WeightsError, match=words) as caught:
        await site.load()
    assert "tables/user.safetensors chunk 2 (bytes 2000 to 3000)" in caught.value.message
    assert "(3 attempts for this chunk" in caught.value.message
    assert caught.value.context["file"] == "tables/user.safetensors"
    assert caught.value.context["chunk"] == 2
    assert {"expected", "found"} < set(caught.value.context)
    assert WeightStore(tmp_path).versions() == [], "nothing partial is ever listed"
    with pytest.raises(WeightsError, match="does not exist"):
        WeightStore(tmp_path).open("v")


async def test_after_a_cut_only_what_is_missing_is_read(origin: WeightStore, tmp_path: Path) -> None:
    first = Site(origin, tmp_path, LoadConfig(streams=1, attempts_max=1))
    first.fs.spoil("user.safetensors", CHUNK, reset)
    with pytest.raises(WeightsError):
        await first.load()
    again = Site(origin, tmp_path)
    same(await again.load(), origin)
    assert again.seen[0].bytes_found > 0
    assert sum(again.fs.reads.values()) == again.num_chunks() - (sum(first.fs.reads.values()) - 1)
    assert again.fs.bytes_read + again.seen[0].bytes_found == again.seen[0].bytes_total


async def test_a_chunk_that_went_bad_on_disk_is_read_again(origin: WeightStore, tmp_path: Path) -> None:
    first = Site(origin, tmp_path, LoadConfig(streams=1, attempts_max=1))
    first.fs.spoil("user.safetensors", CHUNK, reset)
    with pytest.raises(WeightsError):
        await first.load()
    path = tmp_path / f"{LOADING_PREFIX}v" / "dense.safetensors"
    data = bytearray(path.read_bytes())
    data[1500] ^= 4
    path.write_bytes(data)
    again = Site(origin, tmp_path)
    same(await again.load(), origin)
    assert again.fs.reads["dense.safetensors", CHUNK] == 1
    assert again.fs.reads["dense.safetensors", 0] == 0


async def test_a_cancelled_load_can_be_taken_up_again(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path)
    loads: list[asyncio.Task[WeightStore]] = []
    site.seen = Tripwire(lambda: loads[0].cancel(), after=5)
    loads.append(asyncio.create_task(site.load()))
    with pytest.raises(asyncio.CancelledError):
        await loads[0]
    assert WeightStore(tmp_path).versions() == []
    same(await Site(origin, tmp_path).load(), origin)


class Tripwire(list[LoadProgress]):
    """Does something once, after so many reports."""

    def __init__(self, action: Any, after: int) -> None:
        super().__init__()
        self._action, self._after = action, after

    def append(self, state: LoadProgress) -> None:
        super().append(state)
        if len(self) == self._after:
            self._action()


@pytest.mark.parametrize("length", [0, 1000, 1500, 3000])
async def test_a_truncated_file_in_the_store(origin: WeightStore, tmp_path: Path, length: int) -> None:
    site = Site(origin, tmp_path)
    path = f"{origin.root}/v/tables/user.safetensors"
    origin.fs.pipe_file(path, origin.fs.cat_file(path)[:length])
    with pytest.raises(WeightsError, match=rf"user\.safetensors has {length} bytes, the manifest says 3[0-9]{{3}}"):
        await site.load()
    assert WeightStore(tmp_path).versions() == []


async def test_a_file_that_is_gone(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path)
    origin.fs.rm_file(f"{origin.root}/v/dense.safetensors")
    with pytest.raises(WeightsError, match=r"dense\.safetensors is missing"):
        await site.load()
    assert max(site.fs.reads.values()) == 1, "what is not there is not asked for again"


async def test_a_half_written_version_is_refused_before_any_chunk(origin: WeightStore, tmp_path: Path) -> None:
    origin.fs.rm_file(f"{origin.root}/v/manifest.json")
    with pytest.raises(WeightsError, match="was never completed"):
        await load_version(origin, "v", tmp_path)
    assert names(tmp_path) == []


async def test_repeats_have_a_budget(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path, LoadConfig(streams=1, backoff_s=0, attempts_max=100, retries_max=7))
    site.fs.spoil("user.safetensors", 0, reset)
    with pytest.raises(WeightsError, match="7 repeats in all, limits 100 and 7"):
        await site.load()
    assert site.fs.reads["user.safetensors", 0] == 8


async def test_waits_between_repeats_double_to_a_limit(origin: WeightStore, tmp_path: Path) -> None:
    class Sleeps(ManualClock):
        slept: tuple[float, ...] = ()

        async def sleep_s(self, duration_s: float) -> None:
            self.slept = (*self.slept, duration_s)

    clock = Sleeps()
    site = Site(origin, tmp_path)
    config = LoadConfig(streams=1, attempts_max=6, backoff_s=0.5, backoff_max_s=3)
    loader = ParallelLoader(site.source, tmp_path, site.executor, config, clock)
    site.fs.spoil("user.safetensors", 0, reset, times=5)
    await loader.load(origin.open("v").manifest)
    assert clock.slept == (0.5, 1, 2, 3, 3)


async def test_streams_and_bytes_in_flight_are_bounded(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path, LoadConfig(streams=8, in_flight_bytes_max=2 * CHUNK))
    same(await site.load(), origin)
    assert site.loader.budget.held_max <= 2 * CHUNK
    assert site.loader.budget.held == 0
    wide = Site(origin, tmp_path / "wide", LoadConfig(streams=3))
    await wide.load()
    assert wide.fs.at_once_max <= 3


async def test_a_chunk_larger_than_the_budget_goes_alone() -> None:
    budget, order = ByteBudget(10), list[str]()

    async def work(name: str, num_bytes: int) -> None:
        async with budget.hold(num_bytes):
            order.append(name)
            await asyncio.sleep(0)
            assert budget.held <= 10

    await asyncio.gather(work("a", 6), work("whole", 1_000), work("b", 6), work("c", 4))
    assert order == ["a", "whole", "b", "c"]
    assert budget.held == 0


async def test_one_who_stops_waiting_for_the_budget_holds_up_nobody() -> None:
    budget = ByteBudget(10)

    async def hold() -> None:
        async with budget.hold(10):
            pass

    async with budget.hold(10):
        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
    await second
    assert budget.held == 0


async def test_two_loaders_of_one_machine_read_once(origin: WeightStore, tmp_path: Path) -> None:
    sites = [Site(origin, tmp_path), Site(origin, tmp_path)]
    for found in await asyncio.gather(*(site.load() for site in sites)):
        same(found, origin)
    assert sorted(site.fs.bytes_read for site in sites)[0] == 0


async def test_waiting_for_another_process_ends(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path, LoadConfig(lock_wait_s=0))
    async with site.loader._alone("v"):
        with pytest.raises(WeightsError, match="another process has been loading them"):
            await Site(origin, tmp_path, LoadConfig(lock_wait_s=0)).load()


async def test_another_content_under_the_same_name_is_refused(origin: WeightStore, tmp_path: Path) -> None:
    with WeightStore(tmp_path).writer("v") as writer:
        writer.add_json("model", {"width": 5})
        writer.commit()
    with pytest.raises(WeightsError, match="another content under this name"):
        await Site(origin, tmp_path).load()


async def test_a_disk_that_refuses_is_told_apart(origin: WeightStore, tmp_path: Path) -> None:
    site = Site(origin, tmp_path)
    (tmp_path / f"{LOADING_PREFIX}v").write_text("in the way")
    with pytest.raises(WeightsError, match="cannot be written to"):
        await site.load()


async def test_layout_1_loads_with_one_chunk_a_file(origin: WeightStore, tmp_path: Path) -> None:
    """What was published before chunks had checksums is still readable, and says itself to be what it was."""
    old = origin.open("v").manifest.model_dump(mode="json", exclude_none=True)
    old["format_version"] = 1
    for entry in (*old["files"].values(), *old["documents"].values()):
        del entry["chunk_bytes"], entry["chunks"]
    digest = hashlib.sha256(json.dumps(old, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    data = json.dumps({**old, "digest": digest}).encode()
    origin.fs.pipe_file(f"{origin.root}/v/manifest.json", data)
    manifest = origin.open("v").manifest
    assert all(len(entry.pieces()) == 1 for entry in manifest.entries())
    assert json.loads(manifest.encode()) == json.loads(data)
    site = Site(origin, tmp_path)
    same(await site.load(), origin)
    assert site.num_chunks() == 5


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes", "chunks"), [(10, 4, 2), (10, 4, 4), (0, 4, 1), (10, None, 3), (10, 4, None)]
)
def test_checksums_that_do_not_cover_the_file(num_bytes: int, chunk_bytes: int | None, chunks: int | None) -> None:
    digests = None if chunks is None else ("0" * 64,) * chunks
    with pytest.raises(ValueError, match=r"checksums|together"):
        FileEntry(path="a", bytes=num_bytes, sha256="0" * 64, chunk_bytes=chunk_bytes, chunks=digests)


def test_layouts_and_chunks_go_together() -> None:
    bare = FileEntry(path="a", bytes=1, sha256="0" * 64)
    with pytest.raises(ValueError, match="do not go together"):
        Manifest(version="v", created="2026-01-01T00:00:00.000000Z", files={}, documents={"a": bare})


def test_chunks_of_a_file_are_its_bytes_in_order() -> None:
    entry = FileEntry(path="a", bytes=10, sha256="0" * 64, chunk_bytes=4, chunks=("1" * 64, "2" * 64, "3" * 64))
    assert [(chunk.offset, chunk.length) for chunk in entry.pieces()] == [(0, 4), (4, 4), (8, 2)]
    assert FileEntry(path="a", bytes=0, sha256="0" * 64, chunk_bytes=4, chunks=()).pieces() == ()


def test_the_order_is_the_same_whatever_the_manifest_says(origin: WeightStore) -> None:
    manifest = origin.open("v").manifest
    turned = manifest.model_copy(update={"files": dict(reversed(manifest.files.items()))})
    assert load_order(turned) == load_order(manifest)


def test_a_chunk_error_may_be_tried_again_and_is_a_weights_error() -> None:
    wanted = ChunkRequest("v", "a", 4, Chunk(0, 0, 4, "0" * 64))
    error = wanted.error("is wrong", "x", "y")
    assert isinstance(error, WeightsError)
    assert ChunkError.retryable
    assert not WeightsError.retryable
