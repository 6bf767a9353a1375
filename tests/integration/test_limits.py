"""Deadlines and clients that leave: work ends with the request, in every station."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.cases import Case, CaseSource
from benchmarks.client import MeshClient, count_outcomes, encode
from benchmarks.site import Site
from services.ingress.directory import StatusBody
from shared.clock import SystemClock

SLACK_MS = 1_500.0
"""What a burst on a busy two-core machine may add between the deadline and the last byte: JSON of 12 requests."""

BURST = 12
NUM_DROPPED = 500
IDLE_WITHIN_S = 2.0
STATUS_AGE_S = 1.5
"""Counters of the stations are at most so old; waited for on top."""


@pytest.fixture(scope="module")
def case(site: Site) -> Case:
    return CaseSource(site.dataset, site.history_length, seed=9).case(0, "long", 1_000)


@pytest.mark.parametrize("deadline_ms", [50, 75, 150])
async def test_a_burst_of_small_budgets_gets_marked_answers_or_504_in_time(
    site: Site, case: Case, deadline_ms: int
) -> None:
    """Requests of 1,000 candidates, so many at once that two cores cannot serve them all within their budget."""
    request = case.request(None, speculative=True, tier="auto", deadline_ms=deadline_ms, limit=None)
    async with MeshClient(site.url, 10.0, BURST, SystemClock()) as client:
        await client.rank(request)
        answers = await asyncio.gather(*(client.rank(request) for _ in range(BURST)))
    outcomes = count_outcomes(answers)
    assert set(outcomes) <= {"ok", "degraded", "deadline", "shed"}, outcomes
    assert outcomes.get("ok", 0) < BURST, "the budget sufficed for all: nothing was tested"
    for answer in answers:
        if answer.body is not None:
            assert answer.body.total_ms <= deadline_ms + SLACK_MS
            assert set(answer.body.degraded) == set(answer.body.reasons)
        elif answer.outcome == "deadline":
            assert answer.error is not None
            assert answer.error.code == "deadline_exceeded"
            assert answer.error.context["deadline_ms"] == deadline_ms
            assert answer.error.context["stage"]
    assert max(answer.latency_ms for answer in answers) < deadline_ms + SLACK_MS


async def test_clients_that_leave_stop_the_work(site: Site, case: Case, http: httpx.Client) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    request = case.request(None, speculative=False, tier="full", deadline_ms=10_000, limit=None)
    body = encode(request, "json")
    headers = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /v1/rank HTTP/1.1\r\n{headers}\r\n\r\n"

    async def ask_and_leave(stays_s: float) -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(stays_s)
        writer.transport.abort()

    before = _num_cancelled(http)
    await asyncio.gather(*(ask_and_leave(0.002 * turn) for turn in range(NUM_DROPPED)))
    left_s = time.monotonic()
    held = None
    for held in _held(http):
        if not held or time.monotonic() - left_s > IDLE_WITHIN_S + STATUS_AGE_S:
            break
        await asyncio.sleep(0.1)
    assert held == {}, "work that nobody waits for"
    assert _num_cancelled(http) > before, "no client was gone before its answer: nothing was tested"


def _held(http: httpx.Client) -> Iterator[dict[str, int]]:
    """Yield what each replica holds in flight, as often as asked."""
    while True:
        status = StatusBody.model_validate(http.get("/v1/status").json())
        yield {
            f"{replica.id} {name}": count
            for each in status.deployments
            for replica in each.replicas
            for name, count in replica.counters.items()
            if count and (name == "queued" or "in_flight" in name)
        }


def _num_cancelled(http: httpx.Client) -> int:
    """Return the rank requests whose client left first, over all ingress replicas."""
    time.sleep(STATUS_AGE_S)
    status = StatusBody.model_validate(http.get("/v1/status").json())
    (ingress,) = (each for each in status.deployments if each.name == "ingress")
    return sum(replica.counters.get("requests.rank.cancelled", 0) for replica in ingress.replicas)
