"""Benchmark ``mesh``: rank requests over HTTP against a whole mesh.

Three questions: how long one request takes on an idle mesh, by number of candidates; what of it is not compute
(``overhead_ms``); and how many answers a second four clients get that wait for theirs (closed loop: not latency under
load). Requests are real ones of the test split; sizes are interleaved; between idle requests the mesh is left alone for
``PAUSE_S``, so that the work after one answer (speculative embeddings) does not slow the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import Case, CaseSource
from benchmarks.client import Answer, MeshClient, count_outcomes
from benchmarks.harness import measure, turns
from benchmarks.load import closed_loop
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.site import Site, Where, running_site
from shared.clock import Clock, SystemClock
from shared.errors import StageUnavailableError
from shared.schema.api import RankResponse

SIZES = (20, 500, 1000)
MAIN_SIZE = 500
PAUSE_S = 0.1
NUM_CLIENTS = 4
TIMEOUT_S = 15.0
DEADLINE_MS = 5_000


@dataclass(frozen=True, slots=True)
class Effort:
    """How many requests a run sends.

    Args:
        num_rounds: Idle requests of each size that count.
        num_warmup: Idle requests of each size before them.
        num_closed: Requests of the closed loop.
    """

    num_rounds: int = 100
    num_warmup: int = 10
    num_closed: int = 200


QUICK = Effort(num_rounds=5, num_warmup=2, num_closed=20)


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure a running mesh, or one that is started for it and ended.

    Raises:
        StageUnavailableError: the mesh gave no whole answer to measure.
    """
    effort = QUICK if options.quick else Effort()
    clock = SystemClock()
    with running_site(Where(options.url, options.name, options.config)) as site:
        measurements = asyncio.run(_measure(site, effort, options, clock))
    return BenchmarkReport(tuple(measurements), site.config_hash)


async def _measure(site: Site, effort: Effort, options: BenchmarkOptions, clock: Clock) -> list[Measurement]:
    source = CaseSource(site.dataset, site.history_length, options.seed)
    async with MeshClient(site.url, TIMEOUT_S, NUM_CLIENTS, clock) as client:
        idle = await idle_answers(client, source, effort, options.seed, clock)
        began = effort.num_rounds + effort.num_warmup
        cases = [source.case(began + number, "long", MAIN_SIZE) for number in range(effort.num_closed)]
        load = await closed_loop(lambda index: _ask(client, cases[index]), NUM_CLIENTS, len(cases), clock)
    measurements = [figure for size, answers in idle.items() for figure in latency_figures(size, answers)]
    measurements += overhead_figures(idle[MAIN_SIZE])
    answers = [sample.answer for sample in load.samples if sample.answer is not None]
    whole = [answer.latency_ms for answer in _whole(answers)]
    common = _params(MAIN_SIZE, clients=NUM_CLIENTS, not_whole=len(answers) - len(whole))
    measurements.append(measure(f"closed_{NUM_CLIENTS}_p50_ms_{MAIN_SIZE}", whole, "p50", "ms", **common))
    rate = round(load.answers_per_s, 2)
    name = f"closed_{NUM_CLIENTS}_answers_per_s_{MAIN_SIZE}"
    measurements.append(Measurement(name, rate, "1/s", num_samples=len(answers), params=common))
    return measurements


async def idle_answers(
    client: MeshClient, source: CaseSource, effort: Effort, seed: int, clock: Clock
) -> dict[int, list[Answer]]:
    """Send requests one at a time, sizes interleaved, and return the answers that count by size."""
    answers: dict[int, list[Answer]] = {size: [] for size in SIZES}
    for turn in turns([str(size) for size in SIZES], effort.num_rounds, effort.num_warmup, seed):
        size = int(turn.variant)
        case = source.case(turn.round + effort.num_warmup, "long", size)
        answer = await _ask(client, case)
        if turn.counts:
            answers[size].append(answer)
        await clock.sleep_s(PAUSE_S)
    return answers


async def _ask(client: MeshClient, case: Case) -> Answer:
    request = case.request(f"bench-{case.name}", speculative=True, tier="auto", deadline_ms=DEADLINE_MS, limit=None)
    return await client.rank(request)


def latency_figures(size: int, answers: Sequence[Answer]) -> list[Measurement]:
    """Return p50 and p99 of the idle latency for one number of candidates, as the client sees it.

    Raises:
        StageUnavailableError: no answer is whole.
    """
    whole = _whole(answers)
    samples = [answer.latency_ms for answer in whole]
    params = _params(size, pause_s=PAUSE_S, not_whole=len(answers) - len(whole))
    return [measure(f"{name}_ms_{size}", samples, name, "ms", **params) for name in ("p50", "p99")]


def overhead_figures(answers: Sequence[Answer]) -> list[Measurement]:
    """Return what of a request is not compute, and the bars of its waterfall (medians).

    ``overhead_ms``: the ingress's total minus the compute on the longest path. ``http_ms``: the client's latency minus
    the ingress's total.
    """
    bodies = [(answer.latency_ms, answer.body) for answer in _whole(answers) if answer.body is not None]
    params = _params(MAIN_SIZE, pause_s=PAUSE_S)
    overhead = [body.total_ms - critical_compute_ms(body) for _, body in bodies]
    http = [latency_ms - body.total_ms for latency_ms, body in bodies]
    figures = [
        measure("overhead_ms", overhead, "p50", "ms", **params),
        measure("http_ms", http, "p50", "ms", **params),
        measure("total_ms", [body.total_ms for _, body in bodies], "p50", "ms", **params),
    ]
    names = dict.fromkeys(stage.name for _, body in bodies for stage in body.stages)
    for name in names:
        stages = [stage for _, body in bodies for stage in body.stages if stage.name == name]
        compute = [stage.compute_ms for stage in stages if stage.compute_ms is not None]
        extra: dict[str, Param] = {"critical_share": round(float(np.mean([stage.critical for stage in stages])), 3)}
        if compute:
            extra["compute_ms_p50"] = round(float(np.median(compute)), 3)
        metric = f"stage_{name.replace(':', '-').replace(' ', '_').lower()}_ms"
        durations = [stage.duration_ms for stage in stages]
        figures.append(measure(metric, durations, "p50", "ms", **{**params, **extra}))
    return figures


def critical_compute_ms(body: RankResponse) -> float:
    """Return the milliseconds of compute on the longest path of one answer.

    Ranking waits for the input that ends last. That is either the user state, which starts with the request, or one
    that needs the features first; the path is the state alone or the features and that input, and then ranking.
    """
    bars = {stage.name: stage for stage in body.stages}
    inputs = [stage for stage in body.stages if not stage.critical]
    path = [stage for stage in body.stages if stage.critical and stage.name != "preprocess"]
    last = max(inputs, key=lambda stage: stage.start_ms + stage.duration_ms, default=None)
    if last is None or last.name != "sequence":
        path.append(bars["preprocess"])
    if last is not None:
        path.append(last)
    return sum(stage.compute_ms or 0.0 for stage in path)


def _params(size: int, *, clients: int = 1, **others: Param) -> dict[str, Param]:
    return {"candidates": size, "clients": clients, "loop": "closed", **others}


def _whole(answers: Sequence[Answer]) -> list[Answer]:
    whole = [answer for answer in answers if answer.outcome == "ok"]
    if not whole:
        details = "; ".join(sorted({answer.detail for answer in answers if answer.detail})[:3])
        raise StageUnavailableError(f"no whole answer among {count_outcomes(answers)}: {details}")
    return whole
