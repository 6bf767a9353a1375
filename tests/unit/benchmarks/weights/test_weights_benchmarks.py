"""Loading and updates in small, and the chart."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weights import loading, update
from benchmarks.weights.capped import CappedStore
from benchmarks.weights.loading import Site
from benchmarks.weights.update import KEY, Work
from models.updates import LiveWeights
from shared.weights import WeightStore
from training.chart import line_chart, ticks


def test_streams_speed_a_capped_load_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STREAM_BYTES_PER_S", 1.5e6)
    site = Site.prepare(tmp_path, 600_000, 20_000, seed=0)
    one, many = site.load_alone(1), site.load_alone(8)
    assert one >= site.num_bytes / 1.5e6
    assert one / many > 2, "the benchmark itself asks for 6, on a machine of its own"


def test_four_replicas_read_the_origin_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STREAM_BYTES_PER_S", 1e9)
    site = Site.prepare(tmp_path, 400_000, 20_000, seed=0)
    reads, seconds, from_peers = site.load_together()
    assert reads == 1.0
    assert seconds > 0
    assert from_peers == 1.0


def test_each_stream_has_a_cap_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    store = CappedStore(WeightStore(tmp_path).fs, 1e9)
    assert store.cat_file(str(tmp_path / "file"), 10, 20) == bytes(range(10, 20))
    assert store.bytes_read == 10
    assert store.exists(str(tmp_path / "file"))


def test_lookups_go_on_beside_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "NUM_ROWS", 2_000)
    weights = LiveWeights("bench", {KEY: np.zeros((2_000, update.WIDTH), np.float32)}, {})
    work = Work(weights, np.random.default_rng(0))
    table = weights.state.array(KEY)
    live_ms, bare_ms = work.stretch(0.1, table, updating=True)
    assert len(live_ms) == len(bare_ms) == 25
    assert weights.state.sequence == 2
    work.stretch(0.02, table, updating=False)
    assert weights.state.sequence == 2


def test_a_chart_is_svg_with_every_line() -> None:
    lines = {"every <minute>": [0.7, 0.72, 0.71], "never": [0.7, 0.74, 0.7101]}
    root = ET.fromstring(line_chart([0.5, 1, 2], lines, "NE & time", "days", "NE"))
    space = "{http://www.w3.org/2000/svg}"
    points = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert [len(line) for line in points] == [3, 3]
    words = [text.text or "" for text in root.iter(f"{space}text")]
    assert {"NE & time", "days", "every <minute> 0.7100", "never 0.7101"} <= set(words)
    ends = [float(text.attrib["y"]) for text in root.iter(f"{space}text") if "every" in (text.text or "")]
    others = [float(text.attrib["y"]) for text in root.iter(f"{space}text") if "never" in (text.text or "")]
    assert abs(ends[0] - others[0]) >= 16, "names do not cover one another"


@pytest.mark.parametrize(
    ("xs", "lines"), [([1.0], {"a": [1.0]}), ([1, 2], {}), ([1, 2], {"a": [1.0]}), ([1, 2], {"a": [1.0, float("nan")]})]
)
def test_a_chart_of_nothing(xs: list[float], lines: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="a chart needs"):
        line_chart(xs, lines, "", "", "")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.5, 32.1), (0.7712, 0.7813), (-3, 1e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low <= tick <= high for tick in found)


def test_a_flat_line_still_has_a_scale() -> None:
    assert "polyline" in line_chart([0, 1], {"a": [0.5, 0.5]}, "", "", "")
