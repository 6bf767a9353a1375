"""A day of load: the busiest of the World Cup 98 web site where its log is there, else a synthetic day of that shape.

The log is requests per minute of 88 days (M. Arlitt and T. Jin, "1998 World Cup Web Site Access Logs", 1998; free with
its notice). It is not part of this repository: ``worldcup98/invocation_count.csv.gz`` in the data folder is read, see
``docs/autoscaling.md``. What makes the day hard is in both: a quiet night at 4% of the peak, a slow morning, and an
evening on which the rate rises sixfold within two hours and falls by half within ten minutes.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.errors import DataUnavailableError

MINUTES: Final = 1_440
FILE: Final = Path("worldcup98") / "invocation_count.csv.gz"

_POINTS: Final = (
    # hour, share of the peak: what the busiest days of the log have in common, in round numbers
    (0.0, 0.05), (6.0, 0.04), (9.0, 0.05), (12.0, 0.08), (15.0, 0.10), (18.0, 0.11), (18.6, 0.18), (19.0, 0.44),
    (19.7, 0.60), (20.0, 0.50), (20.3, 0.78), (21.5, 0.82), (21.8, 1.0), (22.0, 0.45), (22.5, 0.20), (23.0, 0.10),
    (24.0, 0.08),
)  # fmt: skip
_NOISE: Final = 0.03


@dataclass(frozen=True, slots=True)
class Day:
    """Load by minute.

    Args:
        name: Where it is from: ``worldcup98 <date>`` or ``synthetic``.
        shape: float64 [1440], share of the busiest minute, its highest value 1.
    """

    name: str
    shape: npt.NDArray[np.float64]


def load_day(data_dir: Path, seed: int) -> Day:
    """Return the day to replay.

    Args:
        data_dir: Folder of data.
        seed: Of the synthetic day, which is made where the log is not there.

    Raises:
        DataUnavailableError: the log is there and cannot be read.
    """
    path = data_dir / FILE
    return busiest_day(path) if path.is_file() else synthetic_day(seed)


def busiest_day(path: Path) -> Day:
    """Read the whole day with the busiest minute.

    Raises:
        DataUnavailableError: the file cannot be read; names the line.
    """
    days: dict[str, list[float]] = defaultdict(list)
    line = 1
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                line += 1
                days[row["period"][:10]].append(float(row["count"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataUnavailableError(
            f"cannot read the load in {path}, line {line}: {error}", field="path", value=str(path)
        ) from error
    whole = {date: counts for date, counts in days.items() if len(counts) == MINUTES and max(counts) > 0}
    if not whole:
        raise DataUnavailableError(f"{path} has no day of {MINUTES} minutes", field="path", value=str(path))
    date = max(whole, key=lambda each: max(whole[each]))
    counts = np.asarray(whole[date])
    return Day(f"worldcup98 {date}", counts / counts.max())


def synthetic_day(seed: int) -> Day:
    """Return a day of the same shape, with noise of its own from minute to minute."""
    hours, shares = zip(*_POINTS, strict=True)
    shape = np.interp(np.arange(MINUTES) / 60, hours, shares)
    shape *= 1 + _NOISE * np.random.default_rng(seed).standard_normal(MINUTES)
    return Day("synthetic", shape / shape.max())


def arrivals(
    day: Day, peak_per_s: float, look_s: float, seed: int, hours: float = 24.0
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the arrival times of each stretch of ``look_s``: Poisson, the rate between the minutes on a line.

    Args:
        day: Its shape.
        peak_per_s: Requests a second at its busiest minute.
        look_s: Length of a stretch, seconds.
        seed: Of the arrivals.
        hours: How much of the day, from its end: the evening is what is hard.
    """
    rng = np.random.default_rng(seed)
    minutes = np.arange(MINUTES) * 60.0 + 30.0
    start_s = MINUTES * 60.0 - hours * 3_600
    for number in range(round(hours * 3_600 / look_s)):
        begin_s = number * look_s
        rate = float(np.interp(start_s + begin_s + look_s / 2, minutes, day.shape)) * peak_per_s
        count = rng.poisson(rate * look_s)
        yield begin_s + np.sort(rng.uniform(0.0, look_s, count))
