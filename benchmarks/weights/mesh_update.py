"""Benchmark ``update``: rank requests of a whole mesh while its weights change, and while they do not.

An own mesh serves 20 requests a second in an open loop; in every other stretch a trainer appends 20 deltas a second,
which the mesh follows. Stretches are interleaved in one run, so both sides meet the same machine. Afterwards every
answer is compared with the oracle of the very state that it names: an answer of two states would be that of none.

A stretch begins when the mesh serves the newest state and has served it for as long as it takes until embeddings are
made with it (``precompute.settle_s``): what updates left to do is not counted as idle. How far answers lag behind the
log is measured too: fewer states cost less, and that must show.

What a delta brings: ``ROWS`` rows of the item table and as many of the user table; every ``NETWORK_EVERY``-th one
scales the whole network instead and brings golden answers, which the stations must give before they serve it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Case, CaseSource
from benchmarks.client import Answer, MeshClient, get_json
from benchmarks.harness import measure, quantiles, turns
from benchmarks.judge import Judge, SpeculativeInputs
from benchmarks.load import open_loop
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.site import Site, Where, own_site
from benchmarks.verify import send_events
from benchmarks.weights.drift import Drift, States
from cluster.config import DEFAULT_PATH, WeightsConfig, load_mesh
from cluster.weights import weights_url
from shared.clock import Clock, SystemClock
from shared.errors import StageUnavailableError
from shared.schema.api import RankRequest
from shared.schema.speculative import HitLevel
from shared.settings import load_settings
from shared.weights import WeightStore
from shared.weights.deltas import Delta, parse_stamp
from shared.weights.transfer import copy_version
from training.publish import golden_request

REQUESTS_PER_S: Final = 20
UPDATES_PER_S: Final = 20
ROWS: Final = 200
NETWORK_EVERY: Final = 20
NUM_CANDIDATES: Final = 100
LIMIT: Final = NUM_CANDIDATES
NUM_USERS: Final = 40
DEADLINE_MS: Final = 5_000
TIMEOUT_S: Final = 15.0
IN_FLIGHT_MAX: Final = 200
WRONG_SHOWN: Final = 5
POLL_S: Final = 0.2
SERVED_S_MAX: Final = 60.0
"""After each stretch: longest wait for the newest state."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a run takes.

    Args:
        stretch_s: Length of one stretch.
        num_rounds: Stretches of each kind.
    """

    stretch_s: float = 10.0
    num_rounds: int = 4


QUICK = Effort(stretch_s=4.0, num_rounds=1)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and its answer.

    Args:
        case: What it was made from.
        request: As sent.
        answer: What came of it.
        newest: The delta that had been published last when it was sent.
    """

    case: Case
    request: RankRequest
    answer: Answer
    newest: int = 0

    @property
    def lag_s(self) -> float:
        """By how much the weights of the answer were behind the log when it was asked for, seconds."""
        served = 0 if self.answer.body is None else parse_stamp(self.answer.body.weights_version)[1]
        return max(self.newest - served, 0) / UPDATES_PER_S


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure a mesh of its own, over a copy of its weights: the deltas of the benchmark are nobody else's.

    Raises:
        StageUnavailableError: the mesh gave no whole answer to measure.
    """
    effort = QUICK if options.quick else Effort()
    config = load_mesh(options.config or DEFAULT_PATH)
    origin = WeightStore(weights_url(config, load_settings().var_dir))
    version = origin.latest()
    with TemporaryDirectory(prefix="rankmesh-update-") as folder:
        store = WeightStore(folder)
        asyncio.run(copy_version(origin, version, store))
        where = Where(None, f"{options.name}-update", options.config)
        with own_site(where, WeightsConfig(url=folder, version=version)) as site:
            settle_s = config.ingress.service.precompute.settle_s
            measurements = asyncio.run(_Run(site, store, effort, settle_s, options.seed).measure())
    return BenchmarkReport(tuple(measurements), site.config_hash)


class _Run:
    """One run.

    Args:
        site: The mesh.
        store: Its weights, which the trainer writes to.
        effort: How long.
        settle_s: How long a state serves before embeddings are made with it.
        seed: Of requests and deltas.
    """

    def __init__(self, site: Site, store: WeightStore, effort: Effort, settle_s: float, seed: int) -> None:
        self._site = site
        self._store = store
        self._effort = effort
        self._settle_s = settle_s
        self._seed = seed
        self._clock: Clock = SystemClock()
        base = site.source.version
        self._drift = Drift(store, base, golden_request(site.dataset, site.history_length), seed)
        source = CaseSource(site.dataset, site.history_length, seed)
        # One case a user: an embedding made for a later time would replace, and hide, that of an earlier request.
        drawn = (source.case(number, "long", NUM_CANDIDATES) for number in range(4 * NUM_USERS))
        self._cases = list({case.user: case for case in drawn}.values())[:NUM_USERS]
        self._made = self._published = 0
        self._sent: dict[str, list[Sent]] = {"idle": [], "updates": []}

    async def measure(self) -> list[Measurement]:
        """Run the stretches, judge the answers, and return the figures."""
        async with MeshClient(self._site.url, TIMEOUT_S, 64, self._clock) as client:
            await send_events(client, self._site, self._cases)
            for turn in turns(list(self._sent), self._effort.num_rounds, 1, self._seed):
                deltas = self._deltas() if turn.variant == "updates" else []
                sent, _ = await asyncio.gather(self._traffic(client), self._train(deltas))
                if turn.counts:
                    self._sent[turn.variant] += sent
                await self._served()
        return self._figures()

    async def _served(self) -> None:
        """Wait until what was published is served, and settled.

        Raises:
            StageUnavailableError: it is not within ``SERVED_S_MAX``.
        """
        end_s = self._clock.monotonic_s() + SERVED_S_MAX
        while True:
            updates = (await asyncio.to_thread(get_json, self._site.url, "/v1/status", TIMEOUT_S))["updates"]
            if updates["served"] >= self._published:
                break
            if self._clock.monotonic_s() > end_s:
                raise StageUnavailableError(f"delta {self._published} is not served: {updates}", stage="ingress")
            await self._clock.sleep_s(POLL_S)
        await self._clock.sleep_s(self._settle_s)

    def _deltas(self) -> list[Delta]:
        """Make a stretch's deltas ahead: that is a trainer's work on a trainer's machine."""
        made: list[Delta] = []
        for _ in range(int(self._effort.stretch_s * UPDATES_PER_S)):
            self._made += 1
            made.append(self._drift.network() if self._made % NETWORK_EVERY == 0 else self._drift.rows(ROWS))
        return made

    async def _train(self, deltas: Sequence[Delta]) -> None:
        begin_s = self._clock.monotonic_s()
        for number, delta in enumerate(deltas):
            await self._clock.sleep_s(begin_s + number / UPDATES_PER_S - self._clock.monotonic_s())
            await asyncio.to_thread(self._drift.append, delta)
            self._published = delta.sequence

    async def _traffic(self, client: MeshClient) -> list[Sent]:
        async def send(index: int) -> Sent:
            case = self._cases[index % len(self._cases)]
            request = case.request(None, speculative=True, tier="auto", deadline_ms=DEADLINE_MS, limit=LIMIT)
            newest = self._published
            return Sent(case, request, await client.rank(request), newest)

        load = await open_loop(send, REQUESTS_PER_S, self._effort.stretch_s, IN_FLIGHT_MAX, self._clock)
        return [sample.answer for sample in load.samples if sample.answer is not None]

    def _figures(self) -> list[Measurement]:
        everything = [each for sent in self._sent.values() for each in sent]
        wrong, num_states = self._wrong(everything)
        for fault in wrong[:WRONG_SHOWN]:
            sys.stderr.write(f"wrong: {fault}\n")
        outcomes = Counter(each.answer.outcome for each in everything)
        latency = {
            name: [each.answer.latency_ms for each in sent if each.answer.outcome == "ok"]
            for name, sent in self._sent.items()
        }
        if not all(latency.values()):
            raise StageUnavailableError(f"no whole answers to measure: {dict(outcomes)}", stage="ingress")
        lags = [each.lag_s for each in self._sent["updates"] if each.answer.body is not None]
        params: dict[str, Param] = {
            "requests_per_s": REQUESTS_PER_S,
            "updates_per_s": UPDATES_PER_S,
            "rows_a_delta": 2 * ROWS,
            "network_every": NETWORK_EVERY,
            "candidates": NUM_CANDIDATES,
            "loop": "open",
            "stretch_s": self._effort.stretch_s,
            "rounds": self._effort.num_rounds,
        }
        p99 = {name: quantiles(values)["p99"] for name, values in latency.items()}
        p50 = {name: quantiles(values)["p50"] for name, values in latency.items()}
        return [
            Measurement("p99_ratio", p99["updates"] / p99["idle"], "x", params=params),
            Measurement("p50_ratio", p50["updates"] / p50["idle"], "x", params=params),
            measure("p99_ms_idle", latency["idle"], "p99", "ms", **params),
            measure("p99_ms_updates", latency["updates"], "p99", "ms", **params),
            measure("lag_s", lags, "p99", "s", **params),
            Measurement("answers_wrong", len(wrong), "answers", num_samples=len(everything), params=params),
            Measurement("answers_not_whole", len(everything) - outcomes["ok"], "answers", params=params),
            Measurement("states_served", num_states, "states", params=params),
        ]

    def _wrong(self, sent: Sequence[Sent]) -> tuple[list[str], int]:
        """Judge every answer by the oracle of the state that it names; returns what is wrong, and the states."""
        by_stamp: dict[str, list[Sent]] = {}
        for each in sent:
            if each.answer.body is not None:
                by_stamp.setdefault(each.answer.body.weights_version, []).append(each)
        faults: list[str] = []
        states = States(self._store)
        for stamp in sorted(by_stamp, key=parse_stamp):
            site = self._site
            judge = Judge(states.source(stamp), site.default_limit, site.num_shards, site.precision)
            faults += _faults(judge, by_stamp[stamp], site.vector_dtype)
        return faults, len(by_stamp)


def _faults(judge: Judge, sent: Sequence[Sent], vector_dtype: str) -> list[str]:
    """Return what is wrong with answers of one state; equal answers are judged once."""
    known: set[str] = set()
    embeddings: dict[str, npt.NDArray[np.float32]] = {}
    faults: list[str] = []
    for each in sent:
        body = each.answer.body
        if body is None:
            continue
        text = f"{each.case.name} {[row.model_dump() for row in body.candidates]} {body.degraded}"
        if text in known:
            continue
        known.add(text)
        levels = {row.id: row.speculative for row in body.candidates if row.scored_by == "full"}
        speculative = None
        if set(levels.values()) != {"none"}:
            # Every candidate of a user's requests is the same, so an embedding is of this very pair.
            case = each.case
            if case.name not in embeddings:
                made = judge.oracle.embed(case.user, case.candidates, case.history, case.surface, case.as_of_s)
                embeddings[case.name] = made.astype(vector_dtype).astype(np.float32)
            exact = np.array([levels.get(item) == "exact" for item in case.candidates])
            vectors = np.where(exact[:, None], embeddings[case.name], np.float32(0))
            speculative = SpeculativeInputs(vectors, np.where(exact, HitLevel.EXACT, HitLevel.NONE).astype(np.int8))
        judgement = judge.judge(each.case.name, each.case, each.request, each.answer, speculative)
        faults += [f"{body.weights_version} {judgement.name}: {fault}" for fault in judgement.faults]
    return faults
