from __future__ import annotations

import numpy as np
import pytest

from benchmarks.chaos.slopes import Bound, fit, slope_documents, thinned

MIB = 2.0**20
BOUND = Bound(share_per_h=0.05, floor_per_h=MIB)


def line(per_hour: float, level: float = 100 * MIB, begin_s: float = 0.0, num: int = 60) -> list[tuple[float, float]]:
    times = [begin_s + 10.0 * number for number in range(num)]
    return [(at_s, level + per_hour * (at_s - begin_s) / 3_600) for at_s in times]


def test_a_line_has_its_slope() -> None:
    slope = fit("rss", "sequence", [line(36 * MIB)], BOUND, 60.0)
    assert slope is not None
    assert slope.per_hour == pytest.approx(36 * MIB)
    assert slope.share_per_h == pytest.approx(0.35, abs=0.01)
    assert slope.exceeds


def test_peaks_and_a_step_do_not_make_a_slope() -> None:
    samples = line(0.0)
    samples[10] = (samples[10][0], 900 * MIB)
    samples[-3:] = [(at_s, value + 40 * MIB) for at_s, value in samples[-3:]]
    slope = fit("rss", "sequence", [samples], BOUND, 60.0)
    assert slope is not None
    assert slope.per_hour == 0.0
    assert not slope.exceeds


def test_a_process_that_replaces_another_is_no_growth() -> None:
    small, large = line(0.0, 50 * MIB), line(0.0, 150 * MIB, begin_s=600.0)
    together = fit("rss", "sequence", [small + large], BOUND, 60.0)
    apart = fit("rss", "sequence", [small, large], BOUND, 60.0)
    assert together is not None
    assert together.exceeds
    assert apart is not None
    assert apart.per_hour == 0.0
    assert (apart.num_series, apart.num_samples) == (2, 120)


@pytest.mark.parametrize(("per_hour", "exceeds"), [(4.9, False), (5.1, True), (-9.0, False)])
def test_the_bound_is_a_share_of_the_level(per_hour: float, exceeds: bool) -> None:
    slope = fit("rss", "sequence", [line(per_hour * MIB)], BOUND, 60.0)
    assert slope is not None
    assert slope.exceeds is exceeds


def test_something_small_may_grow_by_the_floor() -> None:
    assert BOUND.limit(2 * MIB) == MIB
    assert BOUND.limit(100 * MIB) == 5 * MIB


def test_what_was_seen_too_shortly_is_not_judged() -> None:
    slope = fit("rss", "sequence", [line(36 * MIB)], BOUND, 600.0)
    assert slope is not None
    assert slope.span_s == 590.0
    assert slope.limit is None
    assert not slope.exceeds
    assert fit("rss", "sequence", [line(1.0, num=1)], BOUND, 0.0) is None


def test_a_long_series_is_thinned_and_keeps_its_slope() -> None:
    times, values = (np.array(each) for each in zip(*line(36 * MIB, num=2_000), strict=True))
    short_times, short_values = thinned(times, values)
    assert len(short_times) == len(short_values) == 300
    assert np.all(np.diff(short_times) > 0)
    slope = fit("rss", "sequence", [list(zip(times, values, strict=True))], None, 0.0)
    assert slope is not None
    assert slope.per_hour == pytest.approx(36 * MIB, rel=1e-6)


def test_the_object_names_resource_and_part() -> None:
    slope = fit("rss", "sequence", [line(36 * MIB)], BOUND, 60.0)
    assert slope is not None
    document = slope_documents([slope])["rss sequence"]
    assert document["unit"] == "bytes"
    assert document["exceeds"] is True
    assert document["per_hour"] == pytest.approx(36 * MIB, abs=1.0)
