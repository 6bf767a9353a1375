"""Requests whose answers are known in advance, sent at a steady rate while something happens to the mesh.

Every candidate of every case has its speculative embedding in the cache before the load begins, so an answer used
either all of them or, where that station was lost, none: each answer says which, and the oracle knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cases import HISTORY_KINDS, Case, CaseSource
from benchmarks.checks import echo_faults, number_faults
from benchmarks.client import Answer, MeshClient
from benchmarks.judge import Judge, SpeculativeInputs
from benchmarks.load import Load, open_loop
from benchmarks.site import Site
from benchmarks.verify import send_events
from shared.clock import Clock
from shared.errors import StageUnavailableError
from shared.schema.api import RankRequest
from shared.schema.speculative import HitLevel

NUM_CASES = 16
NUM_DRAWN = 4 * NUM_CASES
NUM_CANDIDATES = 60
DEADLINE_MS = 1_000
IN_FLIGHT_MAX = 200
WARM_TRIES = 100
WARM_DEADLINE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of the load with its answer."""

    case: Case
    request: RankRequest
    answer: Answer


@dataclass(slots=True)
class WarmTraffic:
    """Sends the cases and judges what comes back.

    Args:
        site: The mesh.
        client: Speaks to it.
        clock: Time.
        seed: Which cases.
        deadline_ms: Budget of each request of the load.
    """

    site: Site
    client: MeshClient
    clock: Clock
    seed: int = 0
    deadline_ms: int = DEADLINE_MS
    cases: list[Case] = field(default_factory=list)
    _judge: Judge = field(init=False)
    _embeddings: dict[str, SpeculativeInputs] = field(default_factory=dict)
    _right: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._judge = Judge(self.site.source, self.site.default_limit, self.site.num_shards, self.site.precision)

    async def warm(self) -> None:
        """Draw the cases, send their users' events, and ask each until its cache is full.

        Raises:
            StageUnavailableError: a cache does not fill.
        """
        source = CaseSource(self.site.dataset, self.site.history_length, self.seed)
        # One case a user: an embedding made for a later time would replace, and hide, that of an earlier request.
        drawn = (
            source.case(number, HISTORY_KINDS[number % len(HISTORY_KINDS)], NUM_CANDIDATES)
            for number in range(NUM_DRAWN)
        )
        self.cases = list({case.user: case for case in drawn}.values())[:NUM_CASES]
        await self.send_events()
        for case in self.cases:
            vectors = self._judge.oracle.embed(case.user, case.candidates, case.history, case.surface, case.as_of_s)
            stored = vectors.astype(self.site.vector_dtype).astype(np.float32)
            levels = np.full(len(case.candidates), HitLevel.EXACT, np.int8)
            self._embeddings[case.name] = SpeculativeInputs(stored, levels)
            for _ in range(WARM_TRIES):
                body = (await self.client.rank(_request(case, WARM_DEADLINE_MS))).body
                if body is not None and all(row.speculative == "exact" for row in body.candidates):
                    break
                await self.clock.sleep_s(0.05)
            else:
                raise StageUnavailableError(f"the cache of case {case.name} does not fill", stage="foundation")

    async def send_events(self) -> None:
        """Give the mesh the events of the cases' users that it does not have."""
        await send_events(self.client, self.site, self.cases)

    async def load(self, rate_per_s: float, duration_s: float) -> Load[Sent]:
        """Send the cases one after the other at a steady rate."""

        async def send(index: int) -> Sent:
            case = self.cases[index % len(self.cases)]
            request = _request(case, self.deadline_ms)
            return Sent(case, request, await self.client.rank(request))

        return await open_loop(send, rate_per_s, duration_s, IN_FLIGHT_MAX, self.clock)

    def wrong(self, sent: Sequence[Sent]) -> list[str]:
        """Return the faults of all answers that are answers, marked ones included; each distinct answer judged once."""
        return [fault for each in sent for fault in self.faults(each)]

    def faults(self, sent: Sent) -> list[str]:
        """Return what is wrong with one answer; nothing when there is none."""
        if sent.answer.body is None:
            return []
        body = sent.answer.body.model_dump_json(exclude={"request_id", "stages", "total_ms", "tier_reason", "reasons"})
        if body in self._right:
            return []
        if not (faults := self._faults(sent)):
            self._right.add(body)
        return faults

    def form_faults(self, sent: Sent) -> list[str]:
        """Return what is wrong with one answer whatever the user's history was: echoes, version, numbers.

        For answers made while the user log had lost its data: nobody outside knows what it held.
        """
        body = sent.answer.body
        if body is None:
            return []
        faults = number_faults(body) + echo_faults(sent.request, body, self.site.default_limit, None)
        if body.weights_version != self.site.source.version:
            faults.append(f"weights {body.weights_version}, must be {self.site.source.version}")
        return [f"{sent.case.name} {body.degraded}: {fault}" for fault in faults]

    def _faults(self, sent: Sent) -> list[str]:
        body = sent.answer.body
        assert body is not None
        levels = {row.speculative for row in body.candidates if row.scored_by == "full"}
        if len(levels) > 1:
            return [f"{sent.case.name}: levels {sorted(levels)} in one answer, the cache held every pair"]
        speculative = self._embeddings[sent.case.name] if levels == {"exact"} else None
        judgement = self._judge.judge(sent.case.name, sent.case, sent.request, sent.answer, speculative)
        return [f"{judgement.name} {body.degraded}: {fault}" for fault in judgement.faults]


def _request(case: Case, deadline_ms: int) -> RankRequest:
    return case.request(None, speculative=True, tier="auto", deadline_ms=deadline_ms, limit=NUM_CANDIDATES)
