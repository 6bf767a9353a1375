"""Two result files side by side: the newest row of each figure, and the ratio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.record import BenchmarkRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure in two files.

    Args:
        benchmark: Benchmark name.
        metric: Metric name.
        params: Parameters, as sorted JSON.
        left: Newest row of the first file, None when only the second has the figure.
        right: Newest row of the second file, likewise.
    """

    benchmark: str
    metric: str
    params: str
    left: BenchmarkRow | None
    right: BenchmarkRow | None

    @property
    def ratio(self) -> float | None:
        """Second value over the first; None when one is missing or the first is 0."""
        if self.left is None or self.right is None or self.left.value == 0:
            return None
        return self.right.value / self.left.value

    @property
    def same_device(self) -> bool:
        """Whether both sides were measured on the same kind of machine; only then does the ratio speak of the code."""
        return self.left is not None and self.right is not None and self.left.device == self.right.device


def compare_rows(left: Sequence[BenchmarkRow], right: Sequence[BenchmarkRow]) -> list[Comparison]:
    """Match rows by benchmark, metric and parameters; of several rows of one figure the last one counts.

    Returns:
        Every figure of either side, in order of first appearance, the first file's before the second's.
    """
    left_by, right_by = {_figure(row): row for row in left}, {_figure(row): row for row in right}
    figures = list(dict.fromkeys([*map(_figure, left), *map(_figure, right)]))
    return [Comparison(*figure, left_by.get(figure), right_by.get(figure)) for figure in figures]


def _figure(row: BenchmarkRow) -> tuple[str, str, str]:
    return row.benchmark, row.metric, json.dumps(row.params, sort_keys=True)
