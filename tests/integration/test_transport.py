"""No tensor over 64 KB passes through the ingress: seen from the operating system, not from our own books.

Results over ``ray.inline_bytes_max`` lie in shared memory, and who reads one has its pages in its own memory map. The
stations that need tensors have megabytes of them after a few large requests; the ingress, which makes every call and
waits for every result, has none. Results below that size travel inside Ray's messages.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from benchmarks.cases import CaseSource
from benchmarks.site import Site
from cluster.config import EDGES, MeshConfig
from services.ingress.directory import StatusBody

LIMIT_BYTES = 65_536
NUM_REQUESTS = 10


def shared_memory_bytes(pid: int) -> int:
    """Return how much of Ray's object store a process has touched, bytes."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # the first line of a mapping: its addresses and its file
            inside = "plasma" in line or "/dev/shm/" in line
        elif inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture(scope="module")
def touched(http: httpx.Client, site: Site) -> dict[str, list[int]]:
    """Return station -> bytes of shared memory that each replica has touched, after large requests."""
    size = len(site.dataset.catalog)
    source = CaseSource(site.dataset, site.history_length, seed=2)
    for number in range(NUM_REQUESTS):
        case = source.case(number, "long", size)
        request = case.request(None, speculative=True, tier="full", deadline_ms=10_000, limit=None)
        answer = http.post("/v1/rank", json=request.model_dump(mode="json", exclude_none=True))
        assert answer.json()["degraded"] == []
    status = StatusBody.model_validate(http.get("/v1/status").json())
    return {
        each.name: [shared_memory_bytes(replica.pid) for replica in each.replicas if replica.pid is not None]
        for each in status.deployments
    }


def test_stations_read_large_tensors_from_shared_memory(touched: dict[str, list[int]]) -> None:
    """Without this the next test could not fail."""
    assert all(touched["ranking:full"])
    assert sum(touched["ranking:full"]) > 4 * LIMIT_BYTES, touched
    assert sum(touched["embedding:0"]) > LIMIT_BYTES, touched


def test_the_ingress_reads_none(touched: dict[str, list[int]]) -> None:
    assert len(touched["ingress"]) == 2
    assert max(touched["ingress"]) <= LIMIT_BYTES, touched


def test_every_call_that_carries_tensors_goes_by_reference() -> None:
    config = MeshConfig()
    stations = ("preprocess", "sequence", "embedding:0", "speculative", "ranking:full", "foundation")
    methods = ("extract", "encode", "lookup", "fill", "rank", "precompute")
    by_value = [
        f"{station}.{method}"
        for station in stations
        for method in methods
        if f"{station.partition(':')[0]}.{method}" in EDGES and config.transport(station, method) == "value"
    ]
    assert by_value == []
    assert config.ray.inline_bytes_max <= LIMIT_BYTES
