"""``rankmesh verify``: real requests over HTTP, every answer compared with the oracle.

Phase A, without speculative embeddings: every mix of 20, 200 and 1,000 candidates; empty, short and long histories;
alone and 16 at once; JSON and msgpack; forced and chosen tiers. The histories come from the data set, cut at the
request's real time; the events are sent to the mesh first, those it already has change nothing. What is refused for
want of capacity (429) is sent again after the time that the answer names: 16 at once are many for a mesh that has just
started, and no answer is no wrong one.

Phase B, with them: requests to the best tier (lower ones use none) of users whose cache is empty, and the same again
after the work behind the answers is done. Which embeddings must be there follows from the first answers; what they are,
from the oracle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from benchmarks.cases import HISTORY_KINDS, Case, CaseSource
from benchmarks.client import WIRES, Answer, MeshClient
from benchmarks.judge import Judge, Judgement, SpeculativeInputs
from benchmarks.shadow import ShadowCache, promised_ids
from benchmarks.site import Site
from benchmarks.trials import AT_ONCE, SIZES, Trial, trial_plan
from shared.clock import Clock, SystemClock
from shared.errors import StageUnavailableError
from shared.hashing import id_key
from shared.schema.api import Event, EventsRequest, RankRequest

TIMEOUT_S = 30.0
DEADLINE_MS = 10_000
EVENTS_AT_ONCE = 1_000
FEW_SHARE = 10
FILL_WAIT_S = 10.0
FILL_POLL_S = 0.02
EXAMPLES_MAX = 20
CANDIDATE_TRIES = 4
"""Users looked at for each one whose cache must be empty, before phase B goes on with fewer."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Verdict:
    """What ``verify`` found; ``wrong`` is what counts.

    Args:
        requests: Answers that were judged.
        wrong: Answers with at least one fault; one more when speculative embeddings were to be seen and none was.
        degraded: Answers that are marked as made without some part.
        max_abs_error: Largest distance of a score from the oracle's.
        tolerance: What the distance may be.
        ties: Ranks at which another candidate of equal value stands.
        shed: Refusals; each request was sent again when its answer said.
        unsummed: Answers whose stages do not add up to their total within 15%.
        exact_hits: Returned candidates that a speculative embedding of the very pair served.
        user_hits: Returned candidates that an aggregate served.
        seconds: Time of the whole run.
        examples: Some faults in words.
    """

    requests: int = 0
    wrong: int = 0
    degraded: int = 0
    max_abs_error: float = 0.0
    tolerance: float = 0.0
    ties: int = 0
    shed: int = 0
    unsummed: int = 0
    exact_hits: int = 0
    user_hits: int = 0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    def add(self, judgement: Judgement, answer: Answer) -> None:
        """Count one judged answer."""
        self.requests += 1
        self.wrong += bool(judgement.faults)
        self.degraded += judgement.degraded
        self.max_abs_error = max(self.max_abs_error, judgement.max_abs_error)
        self.ties += judgement.num_ties
        self.shed += answer.num_shed
        self.unsummed += not judgement.stages_add_up
        rows = answer.body.candidates if answer.body else []
        self.exact_hits += sum(row.speculative == "exact" for row in rows)
        self.user_hits += sum(row.speculative == "user" for row in rows)
        if judgement.faults and len(self.examples) < EXAMPLES_MAX:
            more = f" (and {len(judgement.faults) - 1} more)" if len(judgement.faults) > 1 else ""
            self.examples.append(f"{judgement.name}: {judgement.faults[0]}{more}")

    def document(self) -> dict[str, object]:
        """Return the fields as plain values, floats rounded to what they mean."""
        return {**asdict(self), "seconds": round(self.seconds, 1), "max_abs_error": float(f"{self.max_abs_error:.3e}")}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    name: str
    case: Case
    request: RankRequest
    answer: Answer


@dataclass(frozen=True, slots=True)
class Scope:
    """How much to verify.

    Args:
        num_requests: Requests of phase A, at least 1.
        num_speculative: Users of phase B, two requests each; 0 leaves the phase out.
        seed: Which requests.
        sizes: Numbers of candidates.
    """

    num_requests: int = 300
    num_speculative: int = 48
    seed: int = 0
    sizes: tuple[int, ...] = SIZES


async def verify(
    site: Site, client: MeshClient, scope: Scope, clock: Clock, progress: Progress | None = None
) -> Verdict:
    """Compare a running mesh with the oracle.

    Args:
        site: The mesh, its weights and its data.
        client: Speaks to it; ``AT_ONCE`` connections are enough.
        scope: How much.
        clock: Time.
        progress: Told (what, done, of) as answers are judged.
    """
    began_s = clock.monotonic_s()
    judge = Judge(site.source, site.default_limit, site.num_shards, site.precision)
    source = CaseSource(site.dataset, site.history_length, scope.seed)
    verdict = Verdict(tolerance=judge.tolerance)
    tell = progress or (lambda *_: None)
    exchanges = await phase_a(client, site, source, trial_plan(scope.num_requests, scope.sizes))
    for number, exchange in enumerate(exchanges, start=1):
        judgement = judge.judge(exchange.name, exchange.case, exchange.request, exchange.answer)
        verdict.add(judgement, exchange.answer)
        tell("without speculative embeddings", number, len(exchanges))
    if scope.num_speculative:
        await SpeculativePhase(client, site, judge, clock).run(source, scope, verdict, tell)
    verdict.seconds = clock.monotonic_s() - began_s
    return verdict


def verify_site(site: Site, scope: Scope, progress: Progress | None = None) -> Verdict:
    """Run ``verify`` with a client of its own, outside an event loop."""

    async def run() -> Verdict:
        clock = SystemClock()
        async with MeshClient(site.url, TIMEOUT_S, AT_ONCE, clock) as client:
            return await verify(site, client, scope, clock, progress)

    return asyncio.run(run())


async def phase_a(client: MeshClient, site: Site, source: CaseSource, plan: list[Trial]) -> list[Exchange]:
    """Send the requests of phase A, those of the first half one by one, the others 16 at once."""
    cases = [source.case(trial.number, trial.kind, trial.size) for trial in plan]
    await send_events(client, site, cases)

    async def send(trial: Trial, case: Case) -> Exchange:
        request = case.request(
            f"verify-{case.name}", speculative=False, tier=trial.tier, deadline_ms=DEADLINE_MS, limit=trial.limit
        )
        return Exchange(f"{case.name} ({trial.cell})", case, request, await client.rank_patiently(request, trial.wire))

    pairs = list(zip(plan, cases, strict=True))
    alone = [await send(trial, case) for trial, case in pairs if not trial.at_once]
    at_once = [pair for pair in pairs if pair[0].at_once]
    together: list[Exchange] = []
    for begin in range(0, len(at_once), AT_ONCE):
        together += await asyncio.gather(*(send(*pair) for pair in at_once[begin : begin + AT_ONCE]))
    return alone + together


async def send_events(client: MeshClient, site: Site, cases: Iterable[Case]) -> int:
    """Give the mesh every event of the cases' users up to their last case; returns how many it did not have yet."""
    until_s: dict[int, int] = {}
    for case in cases:
        if case.user_index is not None:
            until_s[case.user_index] = max(until_s.get(case.user_index, 0), case.as_of_s)
    events = [event for user_index, end_s in until_s.items() for event in user_events(site, user_index, end_s)]
    num_new = 0
    for begin in range(0, len(events), EVENTS_AT_ONCE):
        answer = await client.append(EventsRequest(events=events[begin : begin + EVENTS_AT_ONCE]))
        if answer.buffered:
            raise StageUnavailableError("the mesh's user log is out of reach: it buffers events", stage="sequence")
        num_new += answer.appended
    return num_new


def user_events(site: Site, user_index: int, before_s: int) -> list[Event]:
    """Return a user's events strictly before a time, oldest first, with the ids that bulk loading gives them."""
    log = site.dataset.log
    user_id = int(site.dataset.users.user_id[user_index])
    begin = int(log.user_offsets[user_index])
    end = int(log.position_before(np.array([user_index]), before_s)[0])
    return [
        Event(
            event_id=str(log.event_id[position]),
            user_id=user_id,
            item_id=int(log.item_id[position]),
            weight=float(log.rating[position]),
            timestamp_s=int(log.timestamp_s[position]),
        )
        for position in range(begin, end)
    ]


class SpeculativePhase:
    """Phase B.

    Args:
        client: Speaks to the mesh.
        site: The mesh.
        judge: The oracle.
        clock: Time.
    """

    def __init__(self, client: MeshClient, site: Site, judge: Judge, clock: Clock) -> None:
        self._client = client
        self._site = site
        self._judge = judge
        self._clock = clock
        catalog = site.source.tensors("catalog")
        self._groups = dict(zip(catalog["item_keys"].tolist(), catalog["group_keys"].tolist(), strict=True))

    async def run(self, source: CaseSource, scope: Scope, verdict: Verdict, tell: Progress) -> None:
        """Send two requests for each of ``num_speculative`` users whose cache is empty, and judge both.

        Args:
            source: Draws cases; those after the ones of phase A are taken.
            scope: How many.
            verdict: Where judgements are counted.
            tell: Told as users are done.
        """
        num_judged = await self._ask_users(source, scope, verdict, tell)
        tier = self._site.best_tier
        if num_judged == 0:
            verdict.examples.append(f"{tier}: no user with an empty cache was found, another seed draws others")
        elif not verdict.exact_hits:  # without any, equal answers say nothing of the cache
            verdict.wrong += 1
            verdict.examples.append(f"{tier}: no answer had the speculative embedding of its very pair")

    async def _ask_users(self, source: CaseSource, scope: Scope, verdict: Verdict, tell: Progress) -> int:
        seen: set[int | str] = set()
        num_done, num_users, first = 0, scope.num_speculative, scope.num_requests
        for number in range(first, first + CANDIDATE_TRIES * num_users):
            kind = HISTORY_KINDS[number % len(HISTORY_KINDS)]
            case = source.case(number, kind, scope.sizes[number // len(HISTORY_KINDS) % len(scope.sizes)])
            if case.user in seen:
                continue
            seen.add(case.user)
            await send_events(self._client, self._site, [case])
            if await self._both(case, number, verdict):
                num_done += 1
                tell("with speculative embeddings", num_done, num_users)
            if num_done == num_users:
                break
        return num_done

    async def _both(self, case: Case, number: int, verdict: Verdict) -> bool:
        """Ask cold and warm; False when the user's cache was not empty, and nothing was judged."""
        # Few candidates the first time, so that only they are followed up, and all the second time: then there are
        # exact hits, aggregates over ad groups and candidates without either. No id of ours, for the mesh's own says
        # which ingress replica answered.
        size = len(case.candidates)
        few, every = (
            case.request(None, speculative=True, tier=self._site.best_tier, deadline_ms=DEADLINE_MS, limit=limit)
            for limit in (max(size // FEW_SHARE, 1), size)
        )
        wire = WIRES[number % len(WIRES)]
        cold = await self._client.rank_patiently(few, wire)
        if cold.body is not None and any(row.speculative != "none" for row in cold.body.candidates):
            return False
        verdict.add(self._judge.judge(f"{case.name} (cold)", case, few, cold), cold)
        if cold.body is None or cold.body.degraded:
            return True
        promised = promised_ids(cold.body, self._site.precompute_max)
        await self._wait_until_filled(cold.body.request_id.partition("/")[0], len(promised))
        expected = self._expected(case, promised)
        warm = await self._client.rank_patiently(every, wire)
        verdict.add(self._judge.judge(f"{case.name} (warm)", case, every, warm, expected), warm)
        return True

    def _expected(self, case: Case, promised: list[int | str]) -> SpeculativeInputs:
        cache = ShadowCache(self._groups, self._judge.oracle.config.speculative_width)
        if promised:
            vectors = self._judge.oracle.embed(case.user, promised, case.history, case.surface, case.as_of_s)
            stored = vectors.astype(self._site.vector_dtype).astype(np.float32)
            cache.fill([id_key(id_) for id_ in promised], stored, case.as_of_s)
        keys = [id_key(id_) for id_ in case.candidates]
        return SpeculativeInputs(*cache.lookup(keys, case.as_of_s))

    async def _wait_until_filled(self, replica: str, num_promised: int) -> None:
        """Wait until the ingress replica that answered has no work behind answers left.

        Raises:
            StageUnavailableError: it still has after ``FILL_WAIT_S``.
        """
        if num_promised == 0:
            return
        end_s = self._clock.monotonic_s() + FILL_WAIT_S
        while self._clock.monotonic_s() < end_s:
            status = await self._client.get("/v1/status")
            if status["replica"] == replica and status["counters"]["precompute_in_flight"] == 0:
                return
            await self._clock.sleep_s(FILL_POLL_S)
        raise StageUnavailableError(
            f"{replica} still computes speculative embeddings after {FILL_WAIT_S:.0f} s", stage="foundation"
        )
