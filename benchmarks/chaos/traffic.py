"""Requests whose answers are known in advance, sent at a steady rate while something happens to the mesh.

Every candidate of every case has its speculative embedding in the cache before the load begins, so an answer used
either all of them or, where that station was lost, none: each answer says which, and the oracle knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

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
PENDING_MAX = 500
"""Distinct answers that wait for their judgement until the load is over; what comes beyond is judged at once."""

WARM_TRIES = 100
WARM_DEADLINE_MS = 10_000

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of the load with its answer."""

    case: Case
    request: RankRequest
    answer: Answer


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of a request of a long load: its answer's body is judged once for all equal ones, and dropped.

    Args:
        outcome: See ``benchmarks.client.Answer``.
        reasons: Part -> why it was replaced, of a marked answer.
        key: Of ``WarmTraffic.verdict``; None when there is no body, or only its form could be judged.
        wrong: What is wrong with its form, where only that could be judged.
        by_form: Whether only its form could be judged.
        detail: What went wrong in words.
        total_ms: Time that the mesh says it took.
    """

    outcome: str
    reasons: tuple[tuple[str, str], ...] = ()
    key: bytes | None = None
    wrong: tuple[str, ...] = ()
    by_form: bool = False
    detail: str = ""
    total_ms: float | None = None


@dataclass(slots=True)
class WarmTraffic:
    """Sends the cases and judges what comes back.

    Args:
        site: The mesh.
        client: Speaks to it.
        clock: Time.
        seed: Which cases.
        deadline_ms: Budget of each request of the load.
        num_candidates: Of each request.
        history_known: Cleared once the user log has lost data: from then on only the form of answers can be judged.
    """

    site: Site
    client: MeshClient
    clock: Clock
    seed: int = 0
    deadline_ms: int = DEADLINE_MS
    num_candidates: int = NUM_CANDIDATES
    history_known: bool = True
    cases: list[Case] = field(default_factory=list)
    _judge: Judge = field(init=False)
    _embeddings: dict[str, SpeculativeInputs] = field(default_factory=dict)
    _verdicts: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    _pending: dict[bytes, Sent] = field(default_factory=dict)
    _keys: dict[bytes, bytes] = field(default_factory=dict)

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
            source.case(number, HISTORY_KINDS[number % len(HISTORY_KINDS)], self.num_candidates)
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
                body = (await self.client.rank(self._request(case, WARM_DEADLINE_MS))).body
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
            return await self._send(index)

        return await open_loop(send, rate_per_s, duration_s, IN_FLIGHT_MAX, self.clock)

    async def watched_load(self, rate_per_s: float, duration_s: float) -> Load[Seen]:
        """Do as ``load``, however long: of a request some 400 bytes are kept, and of equal answers one to judge."""

        async def send(index: int) -> Seen:
            return self._note(await self._send(index))

        return await open_loop(send, rate_per_s, duration_s, IN_FLIGHT_MAX, self.clock)

    def verdict(self, seen: Seen) -> tuple[str, ...]:
        """Return what is wrong with an answer of a watched load; nothing when there is none."""
        if seen.key is None:
            return seen.wrong
        if (sent := self._pending.pop(seen.key, None)) is not None:
            self._verdicts[seen.key] = tuple(self._faults(sent))
        return self._verdicts[seen.key]

    def _note(self, sent: Sent) -> Seen:
        answer, body = sent.answer, sent.answer.body
        if body is None:
            return Seen(answer.outcome, detail=answer.detail)
        reasons = tuple(body.reasons.items())
        if not self.history_known:
            wrong = tuple(self.form_faults(sent))
            return Seen(answer.outcome, reasons, None, wrong, by_form=True, total_ms=body.total_ms)
        key = _digest(sent)
        key = self._keys.setdefault(key, key)  # one object for all that say the same
        seen = Seen(answer.outcome, reasons, key, total_ms=body.total_ms)
        if key not in self._verdicts:
            self._pending.setdefault(key, sent)
            if len(self._pending) > PENDING_MAX:
                self.verdict(seen)
        return seen

    async def _send(self, index: int) -> Sent:
        case = self.cases[index % len(self.cases)]
        request = self._request(case, self.deadline_ms)
        return Sent(case, request, await self.client.rank(request))

    def _request(self, case: Case, deadline_ms: int) -> RankRequest:
        limit = self.num_candidates
        return case.request(None, speculative=True, tier="auto", deadline_ms=deadline_ms, limit=limit)

    def wrong(self, sent: Sequence[Sent]) -> list[str]:
        """Return the faults of all answers that are answers, marked ones included; each distinct answer judged once."""
        return [fault for each in sent for fault in self.faults(each)]

    def faults(self, sent: Sent) -> list[str]:
        """Return what is wrong with one answer; nothing when there is none."""
        if sent.answer.body is None:
            return []
        key = _digest(sent)
        if key not in self._verdicts:
            self._verdicts[key] = tuple(self._faults(sent))
        return list(self._verdicts[key])

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


def _digest(sent: Sent) -> bytes:
    """Return the same for two answers to one case that say the same, whenever and however they were made."""
    assert sent.answer.body is not None
    body = sent.answer.body.model_dump_json(exclude={"request_id", "stages", "total_ms", "tier_reason", "reasons"})
    return blake2b(f"{sent.case.name}\0{body}".encode(), digest_size=_DIGEST_BYTES).digest()
