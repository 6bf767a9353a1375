from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.harness import interleaved, measure, quantiles, turns
from shared.clock import ManualClock


def test_every_round_calls_every_variant_once() -> None:
    calls = list(turns(["a", "b", "c"], num_rounds=5, num_warmup=2, seed=0))
    for round_ in range(-2, 5):
        assert Counter(turn.variant for turn in calls if turn.round == round_) == {"a": 1, "b": 1, "c": 1}
    assert [turn.round for turn in calls] == sorted(turn.round for turn in calls)
    assert sum(turn.counts for turn in calls) == 15


def test_the_order_is_shuffled_and_repeats_with_the_seed() -> None:
    def order(seed: int) -> list[str]:
        return [turn.variant for turn in turns(["a", "b"], 20, 0, seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    firsts = order(1)[::2]
    assert {"a", "b"} == set(firsts), "one variant always goes first"


@pytest.mark.parametrize(
    ("variants", "rounds", "warmup"), [([], 1, 0), (["a", "a"], 1, 0), (["a"], 0, 0), (["a"], 1, -1)]
)
def test_turns_refuses_what_it_cannot_do(variants: list[str], rounds: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        list(turns(variants, rounds, warmup, 0))


class _TickingClock(ManualClock):
    """Each reading is ``step_s`` later than the last, and a call may add to it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.spent_s = 0.0

    def monotonic_s(self) -> float:
        return self.spent_s


def test_interleaved_leaves_out_the_warm_up_and_measures_each_call() -> None:
    clock = _TickingClock()
    calls: Counter[str] = Counter()

    def work(name: str, duration_s: float) -> None:
        calls[name] += 1
        clock.spent_s += duration_s if calls[name] > 2 else 100.0  # slow while cold

    samples = interleaved(
        {"fast": lambda: work("fast", 0.001), "slow": lambda: work("slow", 0.010)},
        num_rounds=4,
        num_warmup=2,
        seed=0,
        clock=clock,
    )
    assert calls == {"fast": 6, "slow": 6}
    np.testing.assert_allclose(samples["fast"], np.full(4, 1.0))
    np.testing.assert_allclose(samples["slow"], np.full(4, 10.0))


def test_quantiles_are_observed_samples() -> None:
    assert quantiles(np.arange(1, 101)) == {"min": 1.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert quantiles([3.0, 1.0]) == {"min": 1.0, "p50": 1.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert set(quantiles([5.0]).values()) == {5.0}


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_quantiles_refuses_what_has_none(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        quantiles(samples)


def test_measure_takes_the_asked_quantile_as_the_value() -> None:
    measurement = measure("p99_ms_500", np.arange(1, 101), "p99", "ms", candidates=500)
    assert (measurement.metric, measurement.value, measurement.unit, measurement.num_samples) == (
        "p99_ms_500",
        99.0,
        "ms",
        100,
    )
    assert measurement.params == {"candidates": 500}
    assert measurement.quantiles["p50"] == 50.0
