"""Benchmark ``autoscale``: a day of load, in simulated time, against replicas that follow it and replicas that do not.

The same policy code that Ray Serve's controller runs (``cluster.scaling.policy``), Ray Serve's own default policy (its
functions as installed), the same with its target set to the same share of busy time, and as many replicas as the day's
busiest minute needs, all day. The same arrivals, the same times of requests, the same time to start a replica, and no
more replicas than the static ones for anybody. ``cluster.scaling.replay`` says how a station is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS_DIR, Measurement, Param
from benchmarks.registry import BenchmarkOptions, BenchmarkReport
from benchmarks.services.day import Day, arrivals, load_day
from cluster.scaling.config import ScalingConfig
from cluster.scaling.replay import Outcome, Scaler, Station, by_policy, replay, static
from cluster.scaling.rivals import ray_default
from shared.settings import load_settings
from training.chart import line_chart

STATIC_REPLICAS: Final = 20
"""What the busiest minute needs at the busy share that the policy aims at."""

STARTS_S: Final = (60.0, 300.0)
"""Time from asking for a replica until it serves: a model of gigabytes on a warm machine, and one on a machine that has
to be had first. The figures without a suffix are those of the first."""

CHART: Final = RESULTS_DIR / "autoscale.svg"
QUICK_HOURS: Final = 0.5
_CHART_POINTS: Final = 288

POLICY, DEFAULT, TUNED, STATIC = "rankmesh", "ray default", "ray tuned", "static"


def run(options: BenchmarkOptions) -> BenchmarkReport:
    """Replay the day for each way to scale; report hours and misses."""
    day = load_day(load_settings().data_dir, options.seed)
    hours = QUICK_HOURS if options.quick else 24.0
    figures: list[Measurement] = []
    configs = {start_s: scaling(start_s) for start_s in STARTS_S}
    for start_s, config in configs.items():
        station = Station(start_s=start_s)
        peak_per_s = STATIC_REPLICAS * config.busy_target / station.service_s
        found = compare(day, station, config, peak_per_s, options.seed, hours)
        params: dict[str, Param] = {
            "load": day.name,
            "hours": hours,
            "requests": found[POLICY].num_requests,
            "peak_per_s": round(peak_per_s, 1),
            "service_ms": 1e3 * station.service_s,
            "deadline_ms": 1e3 * station.deadline_s,
            "start_s": start_s,
            "static_replicas": STATIC_REPLICAS,
        }
        suffix = "" if start_s == STARTS_S[0] else f"_start_{start_s:.0f}"
        figures += measurements(found, suffix, params)
        _show(found, f"{day.name}: {found[POLICY].num_requests:,} requests, a replica starts in {start_s:.0f} s")
        if not suffix and not options.quick:
            _draw(found, day, peak_per_s * station.service_s / config.busy_target)
    return BenchmarkReport(tuple(figures), configs[STARTS_S[0]].digest())


def scaling(start_s: float) -> ScalingConfig:
    """Return the policy's settings: defaults but for the time to start, and rises seen over twice that time."""
    return ScalingConfig(min_replicas=1, max_replicas=STATIC_REPLICAS, start_s=start_s, trend_s=max(2 * start_s, 120.0))


def compare(
    day: Day, station: Station, config: ScalingConfig, peak_per_s: float, seed: int, hours: float
) -> dict[str, Outcome]:
    """Replay one load for each way to scale; each begins with what the first minute needs, but for the static one."""
    begin = day.shape[-round(hours * 60)] * peak_per_s * station.service_s / config.busy_target
    first = min(max(math.ceil(begin), config.min_replicas), config.max_replicas)
    bounds = config.min_replicas, config.max_replicas
    scalers: dict[str, tuple[Scaler, int]] = {
        POLICY: (by_policy(config), first),
        DEFAULT: (ray_default(*bounds), first),
        TUNED: (ray_default(*bounds, target_ongoing=config.busy_target), first),
        STATIC: (static(config.max_replicas), config.max_replicas),
    }
    return {
        name: replay(arrivals(day, peak_per_s, station.look_s, seed, hours), station, scaler, start, seed)
        for name, (scaler, start) in scalers.items()
    }


def measurements(found: Mapping[str, Outcome], suffix: str, params: dict[str, Param]) -> list[Measurement]:
    """Return the figures of one comparison."""
    ours, default, tuned, fixed = (found[name] for name in (POLICY, DEFAULT, TUNED, STATIC))
    # One miss is the least that a ratio can be over: none of ours over none of theirs would be no number.
    ratio = ours.num_misses / max(default.num_misses, 1)
    count = ours.num_requests
    figures = [
        Measurement("replica_hours_ratio_static", ours.replica_hours / fixed.replica_hours, "ratio"),
        Measurement("miss_ratio_default_policy", ratio, "ratio"),
        Measurement("replica_hours_ratio_default_policy", ours.replica_hours / default.replica_hours, "ratio"),
    ]
    for name, outcome in (("policy", ours), ("default", default), ("tuned", tuned), ("static", fixed)):
        figures += [
            Measurement(f"replica_hours_{name}", outcome.replica_hours, "h"),
            Measurement(f"misses_{name}", float(outcome.num_misses), "requests"),
            Measurement(f"scale_events_{name}", float(outcome.num_up + outcome.num_down), "decisions"),
        ]
    return [
        Measurement(f"{each.metric}{suffix}", each.value, each.unit, num_samples=count, params=params)
        for each in figures
    ]


def _show(found: Mapping[str, Outcome], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("replicas by", "replica-hours", "of static", "misses", "share", "up", "down", "most"):
        table.add_column(name, justify="left" if name == "replicas by" else "right")
    for name, outcome in found.items():
        table.add_row(
            name,
            f"{outcome.replica_hours:.1f}",
            f"{outcome.replica_hours / found[STATIC].replica_hours:.1%}",
            f"{outcome.num_misses:,}",
            f"{outcome.miss_share:.4%}",
            str(outcome.num_up),
            str(outcome.num_down),
            str(max(outcome.targets)),
        )
    Console(stderr=True, highlight=False).print(table)


def _draw(found: Mapping[str, Outcome], day: Day, needed_at_peak: float, path: Path = CHART) -> None:
    """Draw replicas over the day, and what the load needs at the busy share that is aimed at."""
    times_s = np.asarray(found[POLICY].times_s)
    picked = np.linspace(0, len(times_s) - 1, _CHART_POINTS).astype(int)
    hours = times_s[picked] / 3_600
    minutes = np.minimum(times_s[picked] / 60, len(day.shape) - 1).astype(int)
    lines = {"needed": [float(each) * needed_at_peak for each in day.shape[minutes]]}
    lines |= {name: [float(outcome.targets[place]) for place in picked] for name, outcome in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"Replicas over a day, {day.name}"
    path.write_text(line_chart(hours.tolist(), lines, title, "hour", "replicas"), encoding="utf-8")
