"""Benchmark ``overload``: a mesh under 0.5, 1, 2 and 4 times the load that it can carry, and after a burst.

Capacity is what eight clients that wait for their answers get. Then requests arrive whatever became of the earlier ones
(open loop), at random and in bursts (``benchmarks.arrivals``). Goodput counts whole and marked answers within the
budget. The load generator is a process of its own **on the same cores as the mesh**: it takes its share of them, and a
refusal's time includes waiting for a core; ``reject_from_sent`` leaves out what the generator itself was late by.
Recovery is the time after a burst until every later request is answered within one and a half times the largest latency
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeAlias
from urllib.parse import urlsplit

import numpy as np

from benchmarks.ahead import own_session
from benchmarks.arrivals import ARRIVALS, Kind, Times, poisson_times
from benchmarks.cases import CaseSource
from benchmarks.end_to_end.hammer import Hits, Volley, hammer
from benchmarks.harness import measure, quantiles
from benchmarks.record import Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.site import Site, Where, running_site
from shared.clock import SystemClock
from shared.errors import StageUnavailableError
from shared.wire import CandidateBatch, encode_request

NUM_CANDIDATES = 500
NUM_CASES = 32
DEADLINE_MS = 1_000
SLACK_MS = 100.0
"""Between the budget, which counts from the complete body, and the last byte at a client on the same busy cores."""

RATIOS = (0.5, 1.0, 2.0, 4.0)
SETTLED_RATIO = 1.5
_OK, _SHED = 200, 429

Fire: TypeAlias = Callable[[Times], Hits]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a run takes.

    Args:
        closed_s: Time over which capacity is measured, after as much again of warm-up.
        phase_s: Time of each load.
        pause_s: Between loads.
        burst_s: Length of the burst; as long before it, twice as long after.
    """

    closed_s: float = 5.0
    phase_s: float = 8.0
    pause_s: float = 1.0
    burst_s: float = 4.0


QUICK = Effort(closed_s=1.0, phase_s=1.5, pause_s=0.2, burst_s=1.0)


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Measure a running mesh, or one that is started for it and ended.

    Raises:
        StageUnavailableError: the mesh answered nothing.
    """
    effort, clock = QUICK if options.quick else Effort(), SystemClock()
    with (
        running_site(Where(options.url, options.name, options.config)) as site,
        ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=own_session) as pool,
    ):
        parts, bodies = urlsplit(site.url), _bodies(site, options.seed)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80

        def fire(times_s: Times) -> Hits:
            clock.block_s(effort.pause_s)
            return pool.submit(hammer, Volley(host, port, bodies, times_s)).result()

        def closed() -> Hits:
            volley = Volley(host, port, bodies, np.zeros(0), duration_s=effort.closed_s)
            return pool.submit(hammer, volley).result()

        closed()
        capacity = float((closed().status == _OK).sum()) / effort.closed_s
        if not capacity:
            raise StageUnavailableError(f"{site.url} answered no request", stage="ingress")
        figures = [Measurement("capacity_per_s", round(capacity, 2), "1/s", params=_params(clients=8, loop="closed"))]
        for kind in ARRIVALS:
            figures += load_figures(kind, capacity, effort, fire, options.seed)
        figures += recovery_figures(capacity, effort, fire, options.seed)
    return BenchmarkReport(tuple(figures), site.config_hash)


def load_figures(kind: Kind, capacity: float, effort: Effort, fire: Fire, seed: int) -> list[Measurement]:
    """Measure each load of one kind of arrivals."""
    suffix = "" if kind == "poisson" else f"_{kind}"
    figures: list[Measurement] = []
    goodputs: list[float] = []
    for number, ratio in enumerate(RATIOS):
        hits = fire(ARRIVALS[kind](ratio * capacity, effort.phase_s, seed + number))
        goodputs.append(goodput(hits, effort.phase_s))
        counts: dict[str, Param] = {**outcome_counts(hits), "arrivals": kind, "ratio": ratio}
        name = f"{ratio:g}x{suffix}".replace(".", "_")
        figures.append(Measurement(f"goodput_per_s_{name}", round(goodputs[-1], 2), "1/s",
                                   num_samples=len(hits.status), params=_params(**counts)))  # fmt: skip
        if (answered := hits.latency_ms[hits.status == _OK]).size:
            figures.append(measure(f"p99_ms_{name}", answered, "p99", "ms", **_params(**counts)))
        is_shed = hits.status == _SHED
        if ratio == RATIOS[-1] and is_shed.any():
            shed, own = hits.latency_ms[is_shed], hits.late_ms[is_shed]
            figures.append(measure(f"reject_p99_ms{suffix}", shed, "p99", "ms", **_params(**counts)))
            figures.append(measure(f"reject_from_sent_p99_ms{suffix}", shed - own, "p99", "ms", **_params(**counts)))
    peak = max(goodputs)
    ratio_4x = goodputs[-1] / peak if peak else 0.0
    figures.append(Measurement(f"goodput_ratio_4x{suffix}", round(ratio_4x, 3), "1", params=_params(arrivals=kind)))
    return figures


def recovery_figures(capacity: float, effort: Effort, fire: Fire, seed: int) -> list[Measurement]:
    """Measure half a load, a burst of four, and half a load again, without a pause between."""
    begin_s, end_s = effort.burst_s, 2 * effort.burst_s
    parts: Sequence[tuple[float, float, float]] = (
        (0.5, 0.0, begin_s), (RATIOS[-1], begin_s, end_s), (0.5, end_s, 2 * end_s)
    )  # fmt: skip
    times = [
        from_s + poisson_times(ratio * capacity, to_s - from_s, seed + number)
        for number, (ratio, from_s, to_s) in enumerate(parts)
    ]
    hits = fire(np.concatenate(times))
    found = recovery_s(hits, begin_s, end_s)
    params = _params(burst_s=effort.burst_s, observed_s=end_s, **outcome_counts(hits))
    return [Measurement("recovery_s", round(found, 3), "s", num_samples=len(hits.status), params=params)]


def goodput(hits: Hits, duration_s: float) -> float:
    """Return answers within the budget a second of arrivals."""
    return float(((hits.status == _OK) & (hits.latency_ms <= DEADLINE_MS + SLACK_MS)).sum()) / duration_s


def outcome_counts(hits: Hits) -> dict[str, int]:
    """Return what became of the requests; ``late``: answered after the budget, ``failed``: neither 200 nor 429."""
    is_ok = hits.status == _OK
    return {
        "sent": len(hits.status),
        "whole": int((is_ok & hits.is_whole).sum()),
        "marked": int((is_ok & ~hits.is_whole).sum()),
        "shed": int((hits.status == _SHED).sum()),
        "late": int((is_ok & (hits.latency_ms > DEADLINE_MS + SLACK_MS)).sum()),
        "failed": int((~is_ok & (hits.status != _SHED)).sum()),
        "generator_late_ms_p99": round(quantiles(hits.late_ms)["p99"]) if hits.late_ms.size else 0,
    }


def recovery_s(hits: Hits, begin_s: float, end_s: float) -> float:
    """Return the seconds after the end of a burst until every later request is answered as quickly as before it.

    Raises:
        StageUnavailableError: nothing was answered before the burst.
    """
    before = hits.latency_ms[(hits.due_s < begin_s) & (hits.status == _OK)]
    if not before.size:
        raise StageUnavailableError("no request was answered before the burst", stage="ingress")
    is_slow = (hits.status != _OK) | (hits.latency_ms > SETTLED_RATIO * before.max())
    slow = hits.due_s[is_slow & (hits.due_s >= end_s)]
    return float(slow.max() - end_s) if slow.size else 0.0


def _bodies(site: Site, seed: int) -> tuple[bytes, ...]:
    source = CaseSource(site.dataset, site.history_length, seed)
    cases = [source.case(number, "long", NUM_CANDIDATES) for number in range(NUM_CASES)]
    return tuple(
        encode_request(
            {"user_id": case.user, "surface": case.surface, "timestamp_s": case.as_of_s, "deadline_ms": DEADLINE_MS},
            CandidateBatch.of(case.candidates),
        )
        for case in cases
    )


def _params(**params: Param) -> dict[str, Param]:
    return {"candidates": NUM_CANDIDATES, "deadline_ms": DEADLINE_MS, "generator": "same cores", **params}
