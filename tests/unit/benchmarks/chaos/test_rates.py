from __future__ import annotations

import io

from rich.console import Console

from benchmarks.chaos.rates import rate_row, rate_view
from benchmarks.chaos.traffic import Seen
from benchmarks.load import Load, Sample


def load(*outcomes: str | None, took_s: float = 0.05) -> Load[Seen]:
    samples = [
        Sample(number, number / 10, number / 10, number / 10 + took_s, None if outcome is None else Seen(outcome))
        for number, outcome in enumerate(outcomes)
    ]
    return Load(samples, 1.0)


def test_a_rate_is_borne_when_every_answer_is_whole_and_in_time() -> None:
    assert rate_row(10, load("ok", "ok"), 1_000).is_borne
    assert not rate_row(10, load("ok", "degraded"), 1_000).is_borne
    assert not rate_row(10, load("ok", "ok", took_s=1.76), 1_000).is_borne


def test_what_became_of_the_requests_is_counted() -> None:
    row = rate_row(10, load("ok", "degraded", "shed", "hung", None), 1_000)
    assert (row.requests, row.ok, row.degraded, row.shed, row.other, row.late) == (5, 1, 1, 1, 2, 0)
    assert row.p99_ms == 50.0


def test_the_table_has_a_line_a_rate() -> None:
    stream = io.StringIO()
    rows = [rate_row(rate, load("ok"), 1_000) for rate in (7, 31)]
    Console(file=stream, width=160).print(rate_view("trial", rows))
    assert "31" in stream.getvalue()
