"""Whether a resource grows: the slope of its samples over time, robust against steps, peaks and restarts.

Theil and Sen's estimator: the median of the slopes between any two samples. A process that is replaced begins a new
series, and only samples of one series are paired, so that a restart is no slope.

Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shared.config import Config

Resource: TypeAlias = Literal["rss", "descriptors", "threads", "object_store", "store", "connections"]

UNITS: dict[Resource, str] = {
    "rss": "bytes",
    "descriptors": "descriptors",
    "threads": "threads",
    "object_store": "bytes",
    "store": "bytes",
    "connections": "connections",
}

POINTS_MAX = 300
"""Of a series: what is longer is thinned by medians of neighbours; 300 points are 44,850 pairs."""

HOUR_S = 3_600.0

Floats: TypeAlias = npt.NDArray[np.float64]


class Bound(Config):
    """How fast a resource may grow: the larger of the two.

    Args:
        share_per_h: Of its level.
        floor_per_h: In its unit.
    """

    share_per_h: float = Field(ge=0)
    floor_per_h: float = Field(ge=0)

    def limit(self, level: float) -> float:
        """Return the greatest growth in an hour of something at this level."""
        return max(self.share_per_h * level, self.floor_per_h)


@dataclass(frozen=True, slots=True)
class Slope:
    """How one resource of one part of the mesh grew.

    Args:
        resource: What.
        part: Of which part, e.g. a station.
        level: Median of its samples, of one process.
        per_hour: Growth of one process in an hour.
        num_series: Processes that were looked at.
        num_samples: Their samples.
        span_s: Length of the longest series.
        limit: Greatest growth that is allowed; None: no bound, or too short a time to judge.
    """

    resource: Resource
    part: str
    level: float
    per_hour: float
    num_series: int
    num_samples: int
    span_s: float
    limit: float | None

    @property
    def share_per_h(self) -> float:
        """Growth in an hour as a share of the level."""
        return self.per_hour / self.level if self.level else 0.0

    @property
    def exceeds(self) -> bool:
        """Whether it grew faster than allowed."""
        return self.limit is not None and self.per_hour > self.limit


def fit(
    resource: Resource,
    part: str,
    series: Sequence[Sequence[tuple[float, float]]],
    bound: Bound | None,
    span_min_s: float,
) -> Slope | None:
    """Return the slope of some series together; None when none has two samples.

    Args:
        resource: What was sampled.
        part: Of which part.
        series: Of each process its samples, time in seconds and value, by time.
        bound: How fast it may grow.
        span_min_s: A longest series under this is too short to judge.
    """
    usable = [np.asarray(each, np.float64) for each in series if len(each) > 1]
    if not usable:
        return None
    slopes = np.concatenate([_pair_slopes(*thinned(each[:, 0], each[:, 1])) for each in usable])
    level = float(np.median(np.concatenate([each[:, 1] for each in usable])))
    span_s = max(float(each[-1, 0] - each[0, 0]) for each in usable)
    judged = bound is not None and span_s >= span_min_s
    return Slope(
        resource=resource,
        part=part,
        level=level,
        per_hour=float(np.median(slopes)) * HOUR_S,
        num_series=len(usable),
        num_samples=sum(len(each) for each in usable),
        span_s=span_s,
        limit=bound.limit(level) if bound is not None and judged else None,
    )


def thinned(times_s: Floats, values: Floats, points_max: int = POINTS_MAX) -> tuple[Floats, Floats]:
    """Return at most so many points: medians of as many neighbours as it takes."""
    if len(times_s) <= points_max:
        return times_s, values
    parts = np.array_split(np.arange(len(times_s)), points_max)
    return (
        np.array([np.median(times_s[part]) for part in parts]),
        np.array([np.median(values[part]) for part in parts]),
    )


def slope_documents(slopes: Sequence[Slope]) -> dict[str, Mapping[str, float | int | bool | str | None]]:
    """Return the slopes as plain values, by resource and part."""
    return {
        f"{each.resource} {each.part}": {
            "unit": UNITS[each.resource],
            "level": round(each.level, 1),
            "per_hour": round(each.per_hour, 1),
            "share_per_h": round(each.share_per_h, 4),
            "series": each.num_series,
            "samples": each.num_samples,
            "span_s": round(each.span_s, 1),
            "limit": None if each.limit is None else round(each.limit, 1),
            "exceeds": each.exceeds,
        }
        for each in slopes
    }


def _pair_slopes(times_s: Floats, values: Floats) -> Floats:
    first, second = np.triu_indices(len(times_s), 1)
    slopes: Floats = (values[second] - values[first]) / (times_s[second] - times_s[first])
    return slopes
