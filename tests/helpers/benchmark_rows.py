"""A benchmark row with chosen fields, for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.record import BenchmarkRow


def make_row(**fields: Any) -> BenchmarkRow:
    """Return a valid row; ``fields`` replace the defaults."""
    defaults: dict[str, Any] = {
        "benchmark": "mesh",
        "metric": "p50_ms_500",
        "value": 20.0,
        "unit": "ms",
        "quantiles": {"min": 10.0, "p50": 20.0, "p90": 30.0, "p99": 40.0, "max": 41.0},
        "num_samples": 100,
        "params": {"candidates": 500},
        "config_hash": "0123456789ab",
        "seed": 0,
        "commit": "abcdef012345",
        "device": "2 x test",
        "started": "2026-01-01T00:00:00+00:00",
        "versions": {"python": "3.11"},
    }
    return BenchmarkRow(**{**defaults, **fields})
