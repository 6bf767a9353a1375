"""Fair repeats: variants interleaved in shuffled rounds, warm-up apart, medians and quantiles.

Two variants measured one after the other differ by whatever the machine did meanwhile; interleaved, they share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.record import Measurement, Param
from shared.clock import Clock

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of one variant.

    Args:
        variant: Which one.
        round: Round number, from 0; warm-up rounds are negative.
    """

    variant: str
    round: int

    @property
    def counts(self) -> bool:
        """Whether the sample is kept; warm-up samples are not."""
        return self.round >= 0


def turns(variants: Sequence[str], num_rounds: int, num_warmup: int, seed: int) -> Iterator[Turn]:
    """Yield the order of calls: each round calls every variant once, in an order shuffled by the seed.

    Args:
        variants: Names, distinct, at least one.
        num_rounds: Rounds that count, at least 1.
        num_warmup: Rounds before them that do not, at least 0.
        seed: Of the shuffling.

    Raises:
        ValueError: a count is out of range.
    """
    if not variants or len(set(variants)) != len(variants):
        raise ValueError(f"variants must be distinct and at least one, are {list(variants)}")
    if num_rounds < 1 or num_warmup < 0:
        raise ValueError(f"num_rounds must be at least 1 and num_warmup at least 0, are {num_rounds} and {num_warmup}")
    rng = np.random.default_rng(seed)
    for round_ in range(-num_warmup, num_rounds):
        for index in rng.permutation(len(variants)):
            yield Turn(variants[int(index)], round_)


def interleaved(
    variants: Mapping[str, Callable[[], object]], num_rounds: int, num_warmup: int, seed: int, clock: Clock
) -> dict[str, npt.NDArray[np.float64]]:
    """Time synchronous variants in interleaved rounds.

    Args:
        variants: Name -> what to call; its result is dropped.
        num_rounds: Samples of each.
        num_warmup: Calls of each before the first sample.
        seed: Of the order.
        clock: Measures the calls.

    Returns:
        Name -> float64 [num_rounds], milliseconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in turns(list(variants), num_rounds, num_warmup, seed):
        began_s = clock.monotonic_s()
        variants[turn.variant]()
        taken_ms = (clock.monotonic_s() - began_s) * 1e3
        if turn.counts:
            samples[turn.variant].append(taken_ms)
    return {name: np.array(values) for name, values in samples.items()}


def quantiles(samples: npt.ArrayLike) -> dict[str, float]:
    """Return min, p50, p90, p99 and max of at least one sample.

    Quantiles are observed samples (the smallest with at least that share at or below it), never interpolated: the p99
    of 20 samples is their maximum.

    Raises:
        ValueError: there is no sample or one is not finite.
    """
    values = np.asarray(samples, np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"quantiles need finite samples and at least one, got {values.size} of which {_num_bad(values)} not finite"
        )
    found = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
    return {name: round(float(value), 4) for name, value in zip(QUANTILES, found, strict=True)}


def _num_bad(values: npt.NDArray[np.float64]) -> int:
    return int((~np.isfinite(values)).sum())


def measure(metric: str, samples: npt.ArrayLike, quantile: str, unit: str, **params: Param) -> Measurement:
    """Make a measurement whose value is one quantile of the samples.

    Args:
        metric: Metric name.
        samples: At least one finite sample.
        quantile: ``min``, ``p50``, ``p90``, ``p99`` or ``max``.
        unit: Unit of the samples.
        params: What the figure depends on.
    """
    spread = quantiles(samples)
    return Measurement(metric, spread[quantile], unit, spread, int(np.asarray(samples).size), dict(params))
