"""Weights in S3, loaded by replicas of two nodes: the origin is read once, every byte comes by way of a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.settings import child_environment
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta
from shared.weights.errors import DeltaRepeatedError
from tests.helpers.s3_server import S3Server, s3_server

ROOT = Path(__file__).parents[2]
# What the client library does, not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def published(s3: S3Server) -> WeightStore:
    store = WeightStore(f"s3://{s3.bucket}/models", storage_options=s3.options)
    store.fs.mkdir(s3.bucket)
    with store.writer("v", chunk_bytes=2**18) as writer:
        writer.add_tensors("dense", {"w": np.arange(1000, dtype=np.float32)})
        writer.add_tensors("tables/item", {"weight": np.random.default_rng(0).random((60_000, 16), np.float32)})
        writer.add_json("model", {"width": 16})
        writer.commit()
    return store


def test_a_store_in_s3(s3: S3Server) -> None:
    store = published(s3)
    assert store.versions() == ["v"]
    assert store.latest() == "v"
    store.open("v").verify()
    log = DeltaLog(store, "v")
    delta = Delta("v", 1, 0, "now", whole={"dense/w": np.zeros(1000, np.float32)})
    log.append(delta)
    assert log.sequences() == [1]
    assert log.read(1).payload == delta.payload
    with pytest.raises(DeltaRepeatedError):
        log.append(delta)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_four_replicas_on_two_nodes_cost_one_read(s3: S3Server, tmp_path: Path) -> None:
    store = published(s3)
    s3.given.clear()
    environment = child_environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", **s3.environment)
    command = [sys.executable, "-m", "tests.helpers.two_nodes", f"s3://{s3.bucket}/models", "v", str(tmp_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["nodes"] == 2
    entries = store.open("v").manifest.entries()
    assert said["bytes"] == [sum(entry.bytes for entry in entries)] * 4
    table = next(entry for entry in entries if entry.path.startswith("tables"))
    num_chunks = -(-table.bytes // 2**18)
    assert num_chunks > 10
    read = {path.removeprefix(f"/{s3.bucket}/models/v/"): count for path, count in s3.given.items()}
    assert read[table.path] == table.bytes, "four replicas, one read of the origin"
    assert min(said["given"]) > num_chunks, "both nodes gave chunks to all four"
