"""Writing, listing, opening and pruning versions, on a local folder and on an object store."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.weights import WeightStore
from shared.weights.layout import DTYPES
from shared.weights.store import STALE_STAGING_S
from shared.weights.writer import LOADING_PREFIX, STAGING_PREFIX


def write(store: WeightStore, version: str | None = None, value: float = 1.0) -> str:
    writer = store.writer(version)
    writer.add_tensors("dense", {"w": np.full((2, 3), value, np.float32), "b": np.arange(4, dtype=np.int64)})
    writer.add_tensors("tables/item", {"weight": np.full((5, 2), value, np.float16)})
    writer.add_json("model", {"width": 8})
    return writer.commit()


def test_what_is_written_is_read_back(store: WeightStore) -> None:
    version = write(store, "v1", 2.5)
    assert store.versions() == [version] == ["v1"]
    assert store.latest() == "v1"
    reader = store.open("v1")
    assert reader.version == "v1"
    assert set(reader.groups()) == {"dense", "tables/item"}
    assert reader.json("model") == {"width": 8}
    np.testing.assert_array_equal(reader.tensor("dense", "w"), np.full((2, 3), 2.5, np.float32))
    np.testing.assert_array_equal(reader.tensors("dense")["b"], np.arange(4))
    assert reader.tensor("tables/item", "weight").dtype == np.float16
    reader.verify()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 1, 3)])
def test_every_type_and_shape_survives(store: WeightStore, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    arrays = {code: (rng.random(shape) * 100).astype(dtype) for code, dtype in DTYPES.items()}
    writer = store.writer("v")
    writer.add_tensors("all", arrays)
    writer.commit()
    read = store.open("v").tensors("all")
    assert read.keys() == arrays.keys()
    for code, array in arrays.items():
        assert read[code].dtype == array.dtype
        np.testing.assert_array_equal(read[code], array)


def test_views_of_other_arrays_are_written_as_they_look(store: WeightStore) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = store.writer("v")
    writer.add_tensors("g", {"t": base.T, "step": base[:, ::2]})
    writer.commit()
    np.testing.assert_array_equal(store.open("v").tensor("g", "t"), base.T)
    np.testing.assert_array_equal(store.open("v").tensor("g", "step"), base[:, ::2])


def test_arrays_cannot_be_written_to(store: WeightStore) -> None:
    write(store, "v")
    with pytest.raises(ValueError, match="read-only"):
        store.open("v").tensor("dense", "w")[0, 0] = 1.0


async def test_a_name_made_of_time_and_content(store: WeightStore, clock: ManualClock) -> None:
    first = write(store)
    stamp, _, content = first.rpartition("-")
    assert stamp == "20261130-005320"
    assert re.fullmatch("[0-9a-f]{8}", content)
    await clock.advance(1)
    second = write(store, value=1.0)
    await clock.advance(1)
    third = write(store, value=3.0)
    assert second.rpartition("-")[2] == content  # same content, later
    assert third.rpartition("-")[2] != content
    assert store.versions() == [first, second, third]


async def test_versions_are_in_order_of_creation_not_of_name(store: WeightStore, clock: ManualClock) -> None:
    for name in ("zeta", "alpha", "mid"):
        write(store, name)
        await clock.advance(0.001)
    assert store.versions() == ["zeta", "alpha", "mid"]
    assert store.latest() == "mid"


def test_a_version_is_written_once(store: WeightStore) -> None:
    write(store, "v", 1.0)
    with pytest.raises(WeightsError, match="exists already") as caught:
        write(store, "v", 2.0)
    assert caught.value.context["version"] == "v"
    assert store.open("v").tensor("dense", "w")[0, 0] == 1.0


def test_an_interrupted_writer_leaves_nothing_that_is_listed(store: WeightStore) -> None:
    write(store, "good")
    writer = store.writer("half")
    writer.add_tensors("dense", {"w": np.zeros(3, np.float32)})
    assert store.versions() == ["good"]
    assert store.latest() == "good"
    with pytest.raises(WeightsError, match="does not exist"):
        store.open("half")
    writer.abort()
    with pytest.raises(WeightsError, match="closed"):
        writer.add_json("model", {})
    with pytest.raises(WeightsError, match="closed"):
        writer.commit()


def test_a_failed_block_drops_what_it_staged(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(ZeroDivisionError), store.writer("v") as writer:
        writer.add_json("model", {"auc": 1 / 0})
    assert list(tmp_path.iterdir()) == []


def test_commit_in_a_block_keeps_the_version(store: WeightStore) -> None:
    with store.writer("v") as writer:
        writer.add_json("model", {"a": 1})
        writer.commit()
    assert store.open("v").json("model") == {"a": 1}


def test_an_unknown_version_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(WeightsError) as caught:
        store.open("v9")
    assert caught.value.message == f"weights v9: does not exist; {tmp_path} holds none"
    for number in range(7):
        write(store, f"v{number}")
    with pytest.raises(WeightsError) as caught:
        store.open("v9")
    assert caught.value.message == f"weights v9: does not exist; {tmp_path} holds v6, v5, v4, v3, v2"


def test_an_empty_store(store: WeightStore) -> None:
    assert store.versions() == []
    with pytest.raises(WeightsError, match=r"^.*/\S+ holds no complete version"):
        store.latest()
    with pytest.raises(WeightsError, match="does not exist") as caught:
        store.open("v1")
    assert caught.value.context == {"version": "v1", "file": "manifest.json"}


def test_a_writer_refuses_what_no_reader_could_use(store: WeightStore) -> None:
    writer = store.writer("v")
    with pytest.raises(WeightsError, match="nothing was added"):
        writer.commit()
    with pytest.raises(WeightsError, match="has type complex128"):
        writer.add_tensors("g", {"c": np.zeros(2, np.complex128)})
    with pytest.raises(WeightsError, match="no tensors"):
        writer.add_tensors("g", {})
    with pytest.raises(WeightsError, match="cannot be written"):
        writer.add_json("metrics", {"auc": float("nan")})
    with pytest.raises(WeightsError, match="cannot be written"):
        writer.add_json("metrics", {"auc": object()})
    for name in ("../up", "/abs", "Upper", "a//b", "", "a/", ".hidden", "a" * 129, "a/b/c/d/e"):
        with pytest.raises(WeightsError, match="name must match"):
            writer.add_tensors(name, {"w": np.zeros(1)})
    with pytest.raises(WeightsError, match="name of the manifest"):
        writer.add_json("manifest", {})
    writer.add_json("model", {})
    with pytest.raises(WeightsError, match="added already"):
        writer.add_json("model", {})
    writer.add_tensors("model", {"w": np.zeros(1)})  # a group and a document may share a name
    writer.commit()


@pytest.mark.parametrize("version", ["", ".", "..", "../v", "a/b", ".hidden", "a\nb", "v" * 129])
def test_version_names_cannot_lead_elsewhere(store: WeightStore, version: str) -> None:
    with pytest.raises(WeightsError, match="version name must match"):
        store.open(version)
    with pytest.raises(WeightsError, match="version name must match"):
        store.writer(version)


async def test_prune_removes_the_oldest_and_never_the_latest(store: WeightStore, clock: ManualClock) -> None:
    for name in ("c", "b", "a"):
        write(store, name)
        await clock.advance(1)
    assert store.prune(5) == []
    assert store.prune(2) == ["c"]
    assert store.versions() == ["b", "a"]
    assert store.prune(1) == ["b"]
    assert store.prune(1) == []
    assert store.versions() == ["a"]
    assert store.incomplete() == {}
    for keep in (0, -1):
        with pytest.raises(WeightsError, match="at least 1"):
            store.prune(keep)


async def test_prune_leaves_incomplete_versions_to_a_person(tmp_path: Path, clock: ManualClock) -> None:
    store = WeightStore(tmp_path, clock=clock)
    write(store, "old")
    (tmp_path / "old" / "dense.safetensors").unlink()
    await clock.advance(1)
    write(store, "new")
    assert store.prune(1) == []
    assert (tmp_path / "old").is_dir()


async def test_a_mapped_version_outlives_prune(tmp_path: Path, clock: ManualClock) -> None:
    store = WeightStore(tmp_path, clock=clock)
    write(store, "old", 4.0)
    weight = store.open("old").tensor("dense", "w")
    await clock.advance(1)
    write(store, "new")
    assert store.prune(1) == ["old"]
    assert not (tmp_path / "old").exists()
    assert weight.sum() == 24.0


@pytest.mark.parametrize("prefix", [STAGING_PREFIX, LOADING_PREFIX])
def test_prune_sweeps_what_the_dead_left_a_day_ago(tmp_path: Path, prefix: str) -> None:
    clock = ManualClock(time.time())
    store = WeightStore(tmp_path, clock=clock)
    write(store, "v")
    dead, live, slow = (tmp_path / f"{prefix}{name}" for name in ("dead", "live", "slow"))
    for folder in (dead, live, slow):
        (folder / "tables").mkdir(parents=True)
        (folder / "tables" / "item.safetensors").write_bytes(b"x")
    old = (clock.now_s() - STALE_STAGING_S - 1,) * 2
    for folder in (dead, slow):
        os.utime(folder, old)
        os.utime(folder / "tables", old)
    os.utime(dead / "tables" / "item.safetensors", old)
    store.prune(1)
    assert not dead.exists()
    assert live.is_dir()
    assert slow.is_dir(), "a file in it is still growing"
    assert store.versions() == ["v"]


def test_a_local_file_is_mapped_not_copied(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    write(store, "v")
    reader = store.open("v")
    first, second = reader.tensor("dense", "w"), reader.tensor("dense", "w")
    assert first.base is not None
    assert np.shares_memory(first, second)


def test_one_reader_serves_many_threads(store: WeightStore) -> None:
    write(store, "v")
    reader = store.open("v")
    seen: list[int] = []

    def read() -> None:
        seen.append(reader.tensor("dense", "w").__array_interface__["data"][0])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1  # loaded once


def test_unknown_driver_and_unknown_names(store: WeightStore) -> None:
    with pytest.raises(WeightsError, match="nosuch://"):
        WeightStore("nosuch://user:hunter2@bucket/x")
    write(store, "v")
    reader = store.open("v")
    with pytest.raises(WeightsError, match="no tensor group 'nope'; it has dense, tables/item"):
        reader.tensors("nope")
    with pytest.raises(WeightsError, match="no tensor in group dense 'nope'"):
        reader.tensor("dense", "nope")
    with pytest.raises(WeightsError, match="no document 'nope'; it has model"):
        reader.json("nope")


def test_other_files_in_the_store_do_no_harm(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    write(store, "v")
    (tmp_path / "README").write_text("about this folder")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.md").write_text("x")
    assert store.versions() == ["v"]
    assert list(store.incomplete()) == ["notes"]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WeightsError, match="cannot start"):
        WeightStore(tmp_path / "file").writer("v")
