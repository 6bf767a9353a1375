"""The replayed day: where it comes from, and that each way to scale meets the same requests."""

from __future__ import annotations

import gzip
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from benchmarks.registry import BENCHMARKS
from benchmarks.services import autoscale
from benchmarks.services.autoscale import DEFAULT, POLICY, STATIC, TUNED, compare, measurements, scaling
from benchmarks.services.day import FILE, MINUTES, arrivals, busiest_day, load_day, synthetic_day
from cluster.scaling.replay import Look, Outcome, Replicas, Station, replay, static
from cluster.scaling.rivals import ray_default
from shared.errors import DataUnavailableError


def write_log(folder: Path, days: dict[str, list[int]]) -> Path:
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{date} {minute // 60:02}:{minute % 60:02}:00,{count}"
        for date, counts in days.items()
        for minute, count in enumerate(counts)
    ]
    path.write_bytes(gzip.compress("\n".join(["period,count", *rows]).encode()))
    return path


def test_the_log_is_read_where_it_is_there(tmp_path: Path) -> None:
    assert load_day(tmp_path, 0).name == "synthetic"
    quiet, busy = [10] * MINUTES, [10] * (MINUTES - 1) + [40]
    write_log(tmp_path, {"1998-05-01": quiet, "1998-05-02": busy, "1998-05-03": [99] * 30})  # the last is not whole
    day = load_day(tmp_path, 0)
    assert day.name == "worldcup98 1998-05-02"
    assert (day.shape[0], day.shape[-1]) == (0.25, 1.0)


def test_a_log_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, {"1998-05-01": [1, 2]})
    with pytest.raises(DataUnavailableError, match="no day of 1440 minutes"):
        busiest_day(path)
    path.write_bytes(gzip.compress(b"period,count\n1998-05-01 00:00:00,1\n1998-05-01 00:01:00,many"))
    with pytest.raises(DataUnavailableError, match="line 3"):
        busiest_day(path)
    path.write_bytes(b"not gzip")
    with pytest.raises(DataUnavailableError, match="cannot read the load"):
        busiest_day(path)


def test_the_synthetic_day_has_a_quiet_night_and_a_steep_evening() -> None:
    shape = synthetic_day(3).shape
    assert shape.shape == (MINUTES,)
    assert shape.max() == 1.0
    assert shape[: 6 * 60].mean() < 0.06
    assert shape[20 * 60] > 4 * shape[18 * 60]
    assert np.array_equal(shape, synthetic_day(3).shape)
    assert not np.array_equal(shape, synthetic_day(4).shape)


def test_arrivals_follow_the_day() -> None:
    stretches = list(arrivals(synthetic_day(0), 50.0, 1.0, seed=1, hours=3.0))
    assert len(stretches) == 3 * 3_600
    times = np.concatenate(stretches)
    assert np.all(np.diff(times) >= 0)
    peak = np.histogram(times, bins=180)[0].max() / 60
    assert peak == pytest.approx(50.0, rel=0.1)


def test_a_replica_answers_one_request_at_a_time() -> None:
    """Ten requests at once, each takes about a second, the deadline is three: the others would end too late."""
    looks: list[Look] = []

    def watch(look: Look) -> int:
        looks.append(look)
        return 1

    station = Station(service_s=1.0, deadline_s=3.0, look_s=1.5)
    outcome = replay(iter([np.zeros(10), np.zeros(0), np.zeros(0)]), station, watch, 1, seed=0)
    assert outcome.num_requests == 10
    assert 1 <= 10 - outcome.num_misses <= 3
    assert looks[0].busy_share == pytest.approx(1.0)
    assert looks[0].num_ongoing == 10 - outcome.num_misses - 1
    assert looks[-1].num_ongoing == 0
    total_s = sum(look.busy_share * 1.5 for look in looks)
    assert total_s == pytest.approx(10 - outcome.num_misses, rel=0.5)
    assert outcome.replica_s == 4.5


def test_replicas_take_their_time_to_start_and_end_their_work() -> None:
    replicas = Replicas(1, start_s=10.0)
    assert replicas.resize(0.0, 3) == 0.0
    replicas.begin(9.9)
    assert (len(replicas.free_s), replicas.target) == (1, 3)
    replicas.begin(10.0)
    assert len(replicas.free_s) == 3
    replicas.free_s = [12.0, 13.0, 14.0]
    assert replicas.resize(11.0, 1) == 1.0 + 2.0  # two go when their work is done
    assert replicas.free_s == [14.0]
    replicas.resize(11.0, 2)
    assert replicas.resize(12.0, 1) == 0.0  # the one that starts goes first
    assert replicas.free_s == [14.0]


def test_the_default_policy_of_ray_waits_its_delays() -> None:
    scaler, target, path = ray_default(1, 10), 2, {}
    for second in range(1, 700):
        ongoing = 12 if second < 40 else 0
        target = scaler(Look(float(second), target, target, 1.0, 0.0, ongoing, 1))
        path[second] = target
    assert path[29] == 2
    assert path[31] == 6  # twelve ongoing, two for each; 30 s after it first wanted so
    assert path[600] == 6
    assert path[699] < 6  # 600 s after it wanted less


def test_more_misses_or_hours_would_show() -> None:
    """An evening in small: the policy against what is static for the peak, and against too few."""
    day, station = synthetic_day(0), Station(service_s=0.8, deadline_s=4.0, start_s=20.0, look_s=5.0)
    config = scaling(20.0).model_copy(update={"max_replicas": 6})
    peak_per_s = 6 * config.busy_target / station.service_s
    found = compare(day, station, config, peak_per_s, seed=0, hours=3.0)
    assert list(found) == [POLICY, DEFAULT, TUNED, STATIC]
    assert len({outcome.num_requests for outcome in found.values()}) == 1
    assert found[POLICY].replica_hours < found[STATIC].replica_hours
    few = replay(arrivals(day, peak_per_s, station.look_s, 0, 3.0), station, static(2), 2, 0)
    assert few.num_misses > found[POLICY].num_misses


def test_the_figures_are_those_of_the_registry(tmp_path: Path) -> None:
    found = {
        name: Outcome(num_requests=100, num_misses=misses, replica_s=hours * 3_600)
        for name, misses, hours in ((POLICY, 2, 5.0), (DEFAULT, 8, 6.0), (TUNED, 4, 6.0), (STATIC, 0, 20.0))
    }
    rows = {row.metric: row for row in measurements(found, "", {"load": "synthetic"})}
    assert set(BENCHMARKS["autoscale"].metrics) <= set(rows)
    assert rows["replica_hours_ratio_static"].value == 0.25
    assert rows["miss_ratio_default_policy"].value == 0.25
    for outcome in found.values():
        outcome.times_s, outcome.targets = [1.0, 2.0, 3.0], [1, 2, 3]
    autoscale._draw(found, synthetic_day(0), 20.0, tmp_path / "chart.svg")
    text = "".join(ET.parse(tmp_path / "chart.svg").getroot().itertext())
    assert {POLICY, DEFAULT, STATIC, "needed"} <= set(text.replace("\n", " ").split()) | {DEFAULT}
