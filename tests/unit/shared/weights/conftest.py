from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from shared.clock import ManualClock
from shared.weights import WeightStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_796_000_000.25)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[WeightStore]:
    """The same store on a local folder and on an object store."""
    if request.param == "folder":
        yield WeightStore(tmp_path / "weights", clock=clock)
        return
    url = f"memory://{uuid.uuid4().hex}/weights"
    yield WeightStore(url, clock=clock)
    fs, root = fsspec.core.url_to_fs(url)
    if fs.exists(root):
        fs.rm(root, recursive=True)
