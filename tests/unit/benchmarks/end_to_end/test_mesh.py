from __future__ import annotations

import pytest

from benchmarks.client import Answer
from benchmarks.end_to_end.mesh import critical_compute_ms, latency_figures, overhead_figures
from shared.errors import StageUnavailableError
from shared.schema.api import RankResponse, StageTime


def answer(latency_ms: float, total_ms: float, *stages: StageTime) -> Answer:
    body = RankResponse(
        request_id="r",
        user_id=1,
        weights_version="v",
        tier="full",
        tier_reason="default",
        candidates=[],
        num_candidates=500,
        history_length=50,
        degraded=[],
        reasons={},
        num_oov={},
        stages=list(stages),
        total_ms=total_ms,
    )
    return Answer("ok", 200, latency_ms, body=body)


PREPROCESS = StageTime(name="preprocess", start_ms=0, duration_ms=6, compute_ms=2, critical=True)
SHARD = StageTime(name="embedding:0", start_ms=6, duration_ms=3, compute_ms=1)
SEQUENCE = StageTime(name="sequence", start_ms=0, duration_ms=12, compute_ms=10)
RANKING = StageTime(name="ranking:full", start_ms=6, duration_ms=14, compute_ms=9, critical=True)


@pytest.mark.parametrize(
    ("stages", "compute_ms"),
    [
        ((PREPROCESS, RANKING), 2 + 9),
        ((PREPROCESS, SHARD, RANKING), 2 + 1 + 9),
        ((PREPROCESS, SHARD, SEQUENCE, RANKING), 10 + 9),
    ],
    ids=["features only", "a shard is last", "the user state is last"],
)
def test_only_the_longest_path_counts_as_compute(stages: tuple[StageTime, ...], compute_ms: float) -> None:
    body = answer(25, 20, *stages).body
    assert body is not None
    assert critical_compute_ms(body) == compute_ms


def test_overhead_is_the_total_without_the_critical_compute() -> None:
    answers = [answer(25, 20, PREPROCESS, SHARD, RANKING)] * 3
    figures = {figure.metric: figure for figure in overhead_figures(answers)}
    assert figures["overhead_ms"].value == 8
    assert figures["http_ms"].value == 5
    assert figures["stage_ranking-full_ms"].value == 14
    assert figures["stage_ranking-full_ms"].params["compute_ms_p50"] == 9
    assert figures["stage_embedding-0_ms"].params["critical_share"] == 0


def test_latency_leaves_out_answers_that_are_not_whole_and_says_how_many() -> None:
    answers = [answer(float(value), 1) for value in range(1, 101)] + [Answer("hung", 0, 99_999.0)]
    p50, p99 = latency_figures(500, answers)
    assert (p50.metric, p50.value, p99.metric, p99.value) == ("p50_ms_500", 50, "p99_ms_500", 99)
    assert p50.params["not_whole"] == 1


def test_no_whole_answer_is_an_error_that_says_why() -> None:
    with pytest.raises(StageUnavailableError, match="refused"):
        latency_figures(500, [Answer("broken", 0, 1.0, detail="refused")])
