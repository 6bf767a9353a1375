"""Rank requests as columns against the real mesh: the thin client's answers are those of JSON."""

from __future__ import annotations

import asyncio

import numpy as np

from benchmarks.cases import CaseSource
from benchmarks.client import MeshClient
from benchmarks.site import Site
from shared.clock import SystemClock
from shared.wire import CandidateBatch, IdLists
from shared.wire.client import RankClient


async def test_columns_give_the_answer_that_json_gives(site: Site) -> None:
    case = CaseSource(site.dataset, site.history_length, seed=4).case(0, "long", 500)
    request = case.request("r", speculative=False, tier="full", deadline_ms=5_000, limit=500)
    async with MeshClient(site.url, 10.0, 1, SystemClock()) as client:
        expected = (await client.rank(request)).body
    assert expected is not None
    fields = request.model_dump(exclude={"candidates", "features", "user_id"}, exclude_none=True)

    def ask(batch: CandidateBatch) -> tuple[int, dict[str, object]]:
        sender = RankClient(site.url)
        try:
            return sender.rank(batch, case.user, **fields)
        finally:
            sender.close()

    status, answer = await asyncio.to_thread(ask, CandidateBatch.of(case.candidates))
    assert status == 200
    assert answer["candidates"] == [row.model_dump() for row in expected.candidates]

    carried = IdLists(np.arange(501), np.full(500, 1_999, np.int64))
    status, other = await asyncio.to_thread(ask, CandidateBatch.of(case.candidates, {"year": carried}))
    assert status == 200
    assert other["candidates"] != answer["candidates"], "what candidates carry counts"
    status, refused = await asyncio.to_thread(ask, CandidateBatch.of(case.candidates, {"unheard": carried}))
    assert (status, refused["code"]) == (422, "invalid_request")
