"""Publishing a version that lies elsewhere."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from shared.clock import ManualClock
from shared.errors import WeightsError
from shared.weights import LoadConfig, WeightStore
from shared.weights.transfer import copy_version


@pytest.fixture
def elsewhere() -> Iterator[WeightStore]:
    url = f"memory://{uuid.uuid4().hex}/weights"
    yield WeightStore(url, clock=ManualClock())
    fs, root = fsspec.core.url_to_fs(url)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def write(store: WeightStore, value: float = 1.0) -> None:
    with store.writer("v", chunk_bytes=100) as writer:
        weight = np.random.default_rng(0).random((50, 4), np.float32)  # no two chunks alike: those would be read once
        writer.add_tensors("tables/item", {"weight": weight * np.float32(value)})
        writer.add_json("model", {"width": 4})
        writer.commit()


async def test_a_copy_is_the_version(store: WeightStore, elsewhere: WeightStore) -> None:
    write(elsewhere)
    assert await copy_version(elsewhere, "v", store) == "v"
    assert store.versions() == ["v"]
    store.open("v").verify()
    assert store.open("v").manifest == elsewhere.open("v").manifest
    assert await copy_version(elsewhere, "v", store) == "v", "once more costs nothing and changes nothing"


async def test_a_copy_back_to_an_object_store(elsewhere: WeightStore, tmp_path: Path) -> None:
    local = WeightStore(tmp_path)
    write(local)
    await copy_version(local, "v", elsewhere)
    elsewhere.open("v").verify()


async def test_a_name_that_is_taken_by_another_content(store: WeightStore, elsewhere: WeightStore) -> None:
    write(elsewhere)
    write(store, value=2.0)
    with pytest.raises(WeightsError, match="another content under this name"):
        await copy_version(elsewhere, "v", store)
    assert store.open("v").tensor("tables/item", "weight").max() > 1.0


@pytest.mark.parametrize("reason", ["leads outside the version folder", "is no regular file", "the manifest says"])
async def test_a_local_source_is_looked_at_before_it_is_read(tmp_path: Path, reason: str) -> None:
    source, target = WeightStore(tmp_path / "a"), WeightStore(tmp_path / "b")
    write(source)
    path, held = tmp_path / "a" / "v" / "model.json", tmp_path / "model.json"
    path.rename(held)
    if reason.startswith("leads"):
        path.symlink_to(held)  # the very bytes that the manifest expects
    elif reason.startswith("is no"):
        os.mkfifo(path)
    else:
        path.write_bytes(held.read_bytes() * 2)
    with pytest.raises(WeightsError, match=reason):
        await copy_version(source, "v", target)
    assert target.versions() == []


async def test_a_damaged_source_publishes_nothing(store: WeightStore, elsewhere: WeightStore) -> None:
    write(elsewhere)
    path = f"{elsewhere.root}/v/tables/item.safetensors"
    data = bytearray(elsewhere.fs.cat_file(path))
    data[150] ^= 1
    elsewhere.fs.pipe_file(path, bytes(data))
    with pytest.raises(WeightsError, match=r"item\.safetensors chunk 1 \(bytes 100 to 200\)"):
        await copy_version(elsewhere, "v", store, LoadConfig(backoff_s=0))
    assert store.versions() == []


async def test_an_upload_that_loses_bytes_is_not_sealed(
    elsewhere: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = WeightStore(tmp_path)
    write(local)

    def lossy(source: str, target: str) -> None:
        elsewhere.fs.pipe_file(target, Path(source).read_bytes()[:-1])

    monkeypatch.setattr(elsewhere.fs, "put_file", lossy)
    with pytest.raises(WeightsError, match="arrived with"):
        await copy_version(local, "v", elsewhere)
    assert elsewhere.versions() == []
