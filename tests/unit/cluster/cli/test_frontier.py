"""``frontier`` draws what it shows, and prints one JSON document where it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.frontier import app
from shared.weights import WeightStore
from training.frontier import Frontier, Point

_FRONTIER = Frontier(
    {0: 10, 2: 100},
    (Point(0.1, 0.80, {0: 1.0}), Point(1.0, 0.78, {2: 1.0})),
    (Point(0.1, 0.80, {0: 1.0}, 0.2), Point(0.5, 0.775, {0: 0.5, 2: 0.5}, 0.1)),
)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_frontier_is_shown_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    store = WeightStore(tmp_path / "weights")
    with store.writer("v1") as writer:
        writer.add_json("model", {})
        writer.commit()
    monkeypatch.setattr("training.frontier.frontier_of_version", lambda *_: _FRONTIER)
    chart = tmp_path / "drawn" / "frontier.svg"
    args = ["--store", str(tmp_path / "weights"), "--chart", str(chart)]
    result = CliRunner().invoke(app, [*args, "--json"] if as_json else args)
    assert result.exit_code == 0, result.output
    assert chart.read_text().startswith("<svg")
    if as_json:
        document = json.loads(result.stdout)
        assert (document["version"], document["flops_saved_at_equal_ne"]) == ("v1", 0.5)
    else:
        for word in ("v1", "depth 2", "FLOPs saved at equal NE: 50%", "frontier.svg"):
            assert word in result.output
