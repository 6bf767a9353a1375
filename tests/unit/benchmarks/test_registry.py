from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.registry import BENCHMARKS, load
from shared.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden" / "benchmarks.json"


def test_names_of_benchmarks_and_metrics_never_change() -> None:
    """Figures of different days are compared by these names: new ones may come, none may go."""
    for name, metrics in json.loads(GOLDEN.read_text(encoding="utf-8")).items():
        assert set(metrics) <= set(BENCHMARKS[name].metrics), name


def test_every_benchmark_can_be_loaded() -> None:
    assert all(callable(load(name)) for name in BENCHMARKS)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there are mesh, stations"):
        load("nothing")


def test_a_name_that_is_nearly_one_is_told_which() -> None:
    with pytest.raises(ConfigError, match=r"no benchmark is called overlaod; .*; did you mean overload\?"):
        load("overlaod")
