"""When requests arrive under an open loop: at random, or in bursts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Times: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal["poisson", "bursty"]

BURST_RATIO = 3.0
"""Rate inside a burst over the mean rate."""

BURST_S, CALM_S = 0.5, 1.5
"""Mean lengths of bursts and of the calm between them, seconds."""


def poisson_times(rate_per_s: float, duration_s: float, seed: int) -> Times:
    """Return arrival times in seconds, ascending, from 0 to the duration: independent arrivals at a fixed rate."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate_per_s * duration_s)
    return np.sort(rng.uniform(0.0, duration_s, count))


def bursty_times(rate_per_s: float, duration_s: float, seed: int) -> Times:
    """Return arrival times of the same mean rate that come in bursts: a Poisson process whose rate switches.

    Bursts of three times the mean rate alternate with a calm of a third of it; both last for exponential times, a
    quarter of the time is burst.
    """
    rng = np.random.default_rng(seed)
    share = BURST_S / (BURST_S + CALM_S)
    calm_rate = rate_per_s * (1.0 - share * BURST_RATIO) / (1.0 - share)
    times: list[Times] = []
    begin_s, in_burst = 0.0, bool(rng.random() < share)
    while begin_s < duration_s:
        length_s = rng.exponential(BURST_S if in_burst else CALM_S)
        end_s = min(begin_s + length_s, duration_s)
        rate = rate_per_s * BURST_RATIO if in_burst else calm_rate
        times.append(rng.uniform(begin_s, end_s, rng.poisson(rate * (end_s - begin_s))))
        begin_s, in_burst = end_s, not in_burst
    return np.sort(np.concatenate(times))


ARRIVALS: dict[Kind, Callable[[float, float, int], Times]] = {"poisson": poisson_times, "bursty": bursty_times}
