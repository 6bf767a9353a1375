"""How many requests a second the mesh of a scenario bears on this machine while nothing is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from rich.table import Table

from benchmarks.chaos.outcome import LATE_SLACK_MS
from benchmarks.chaos.traffic import Seen, WarmTraffic
from benchmarks.load import Load

Rates: TypeAlias = tuple[float, ...]

PAUSE_S = 3.0
"""Between two rates: what one left in the queues is no load of the next."""


@dataclass(frozen=True, slots=True)
class RateRow:
    """What became of the requests at one rate.

    Args:
        requests_per_s: Arrivals.
        requests: Due requests.
        ok: Whole answers.
        degraded: Marked answers.
        shed: 429.
        other: Neither: lost, or 5xx.
        late: Answers later than their deadline and ``LATE_SLACK_MS`` after they were sent.
        p50_ms: Of the whole and marked answers, from the due time.
        p99_ms: The same.
        client_late_ms: By how much the client itself was late at most.
    """

    requests_per_s: float
    requests: int
    ok: int
    degraded: int
    shed: int
    other: int
    late: int
    p50_ms: float
    p99_ms: float
    client_late_ms: float

    @property
    def is_borne(self) -> bool:
        """Whether every request got a whole answer in time."""
        return self.ok == self.requests and not self.late


async def measure(traffic: WarmTraffic, rates: Sequence[float], seconds: float) -> list[RateRow]:
    """Send at each rate in turn.

    Args:
        traffic: Warm.
        rates: Requests a second.
        seconds: At each.
    """
    rows = []
    for rate in rates:
        rows.append(rate_row(rate, await traffic.watched_load(rate, seconds), traffic.deadline_ms))
        await traffic.clock.sleep_s(PAUSE_S)
    return rows


def rate_row(rate: float, load: Load[Seen], deadline_ms: float) -> RateRow:
    """Count what became of a load."""
    outcomes = Counter("not_sent" if each.answer is None else each.answer.outcome for each in load.samples)
    answered = [each for each in load.samples if each.answer is not None and each.answer.outcome in ("ok", "degraded")]
    latencies = [each.latency_ms for each in answered] or [float("nan")]
    p50_ms, p99_ms = np.quantile(latencies, (0.5, 0.99))
    known = outcomes["ok"] + outcomes["degraded"] + outcomes["shed"]
    return RateRow(
        requests_per_s=rate,
        requests=len(load.samples),
        ok=outcomes["ok"],
        degraded=outcomes["degraded"],
        shed=outcomes["shed"],
        other=len(load.samples) - known,
        late=sum(each.latency_ms - each.late_ms > deadline_ms + LATE_SLACK_MS for each in answered),
        p50_ms=round(float(p50_ms), 1),
        p99_ms=round(float(p99_ms), 1),
        client_late_ms=round(max((each.late_ms for each in load.samples), default=0.0), 1),
    )


def rate_view(name: str, rows: Sequence[RateRow]) -> Table:
    """Return a table for a terminal."""
    table = Table(title=f"{name}: nothing is broken")
    heads = ("requests/s", "requests", "whole", "marked", "shed", "other", "late", "p50 ms", "p99 ms", "client late ms")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        counts = (row.requests, row.ok, row.degraded, row.shed, row.other, row.late)
        times = (row.p50_ms, row.p99_ms, row.client_late_ms)
        style = "" if row.is_borne else "yellow"
        table.add_row(f"{row.requests_per_s:g}", *map(str, counts), *(f"{each:.0f}" for each in times), style=style)
    return table
