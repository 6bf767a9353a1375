"""What a real mesh does before Ray Serve handles a request, and what of Ray it runs without."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx

from benchmarks.cases import CaseSource
from benchmarks.client import encode
from benchmarks.site import Site
from cluster.local import Mesh
from cluster.processes import members
from shared.clock import SystemClock

BURST = 200
WHOLE_IN_A_ROW, SOON_S = 8, 10.0
SERVES_MARK = "x-request-id"
"""Serve gives an id to everything that it handles."""


async def test_a_burst_is_refused_before_serve_begins(site: Site) -> None:
    case = CaseSource(site.dataset, site.history_length, seed=9).case(0, "long", 1_000)
    request = case.request(None, speculative=True, tier="auto", deadline_ms=300, limit=None)
    body, headers = encode(request, "json"), {"content-type": "application/json"}
    limits = httpx.Limits(max_connections=BURST)
    async with httpx.AsyncClient(base_url=site.url, timeout=30, limits=limits, trust_env=False) as client:
        assert SERVES_MARK in (await client.get("/healthz")).headers
        await client.post("/v1/rank", content=body, headers=headers)
        answers = await asyncio.gather(*(client.post("/v1/rank", content=body, headers=headers) for _ in range(BURST)))
    at_the_door = [answer for answer in answers if SERVES_MARK not in answer.headers]
    assert at_the_door, [answer.status_code for answer in answers]
    for answer in at_the_door:
        assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
    await whole_again(site)


async def whole_again(site: Site) -> None:
    """Wait until answers of both ingress replicas are whole: no station that had no core is held for a silent one."""
    case = CaseSource(site.dataset, site.history_length, seed=9).case(1, "long", 30)
    request = case.request(None, speculative=True, tier="auto", deadline_ms=1_000, limit=None)
    number, clock = 0, SystemClock()
    until_s = clock.monotonic_s() + SOON_S
    async with httpx.AsyncClient(base_url=site.url, timeout=30, trust_env=False) as client:
        while number < WHOLE_IN_A_ROW:
            answer = (await client.post("/v1/rank", json=request.model_dump(mode="json", exclude_none=True))).json()
            number = number + 1 if answer.get("degraded") == [] else 0
            assert clock.monotonic_s() < until_s, answer


def test_no_process_reads_logs_for_nobody(mesh: Mesh) -> None:
    commands = []
    for process in members(mesh.state.mesh_id):
        with suppress(OSError):  # it has ended meanwhile
            commands.append(Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    assert any("raylet" in command for command in commands)
    assert not [command for command in commands if "log_monitor" in command]
