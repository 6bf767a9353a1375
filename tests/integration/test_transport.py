"""No tensor over 64 KB passes through the ingress: seen from the operating system, not from our own books.

Results over ``ray.inline_bytes_max`` lie in shared memory, and the system notes which of its pages each process reads.
The stations that need tensors read hundreds of kilobytes for a few large requests; the ingress, which makes every call
and waits for every result, none. Results below that size travel inside Ray's messages.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from benchmarks.cases import CaseSource
from benchmarks.site import Site
from cluster.config import EDGES, MeshConfig
from services.ingress.directory import StatusBody

LIMIT_BYTES = 65_536
NUM_REQUESTS = 12


def forget_pages(pid: int) -> None:
    """Make the system forget which pages a process has read."""
    Path(f"/proc/{pid}/clear_refs").write_text("1", encoding="ascii")


def shared_bytes_read(pid: int) -> int:
    """Return how much of Ray's object store a process has read since ``forget_pages``, bytes, in whole pages."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # the first line of a mapping: its addresses and its file
            inside = "plasma" in line
        elif inside and first == "Referenced:":
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture(scope="module")
def read(http: httpx.Client, site: Site) -> dict[str, list[int]]:
    """Return station -> bytes of shared memory that each replica read while every item there is was ranked."""
    status = StatusBody.model_validate(http.get("/v1/status").json())
    pids = {each.name: [replica.pid for replica in each.replicas if replica.pid] for each in status.deployments}
    source = CaseSource(site.dataset, site.history_length, seed=2)
    for pid in itertools.chain.from_iterable(pids.values()):
        forget_pages(pid)
    for number in range(NUM_REQUESTS):
        case = source.case(number, "long", len(site.dataset.catalog))
        request = case.request(None, speculative=True, tier="full", deadline_ms=10_000, limit=None)
        answer = http.post("/v1/rank", json=request.model_dump(mode="json", exclude_none=True))
        assert answer.status_code == 200, answer.text
    return {name: [shared_bytes_read(pid) for pid in each] for name, each in pids.items()}


def test_stations_read_large_tensors_from_shared_memory(read: dict[str, list[int]]) -> None:
    """Without this the next test could not fail."""
    assert sum(read["ranking:full"]) > 8 * LIMIT_BYTES, read
    assert sum(read["embedding:0"]) > 4 * LIMIT_BYTES, read


def test_the_ingress_reads_none(read: dict[str, list[int]]) -> None:
    """One tensor a request would be ``NUM_REQUESTS`` times the limit; Ray's own bookkeeping touches some pages."""
    assert len(read["ingress"]) == 2
    assert max(read["ingress"]) < 2 * LIMIT_BYTES, read


def test_every_call_that_carries_large_tensors_goes_by_reference() -> None:
    config = MeshConfig()
    tensors = [edge for edge in EDGES if edge not in ("sequence.append", "sequence.keep_explored")]
    assert len(tensors) >= 7
    assert [edge for edge in tensors if config.transport(*edge.split(".")) == "value"] == []
    assert config.ray.inline_bytes_max <= LIMIT_BYTES
