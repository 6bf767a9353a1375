"""The state of a mesh as a person reads it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli.status_view import status_table
from tests.helpers.mesh_answers import VERSION, status_body
from tests.helpers.terminal import lines

URL = "http://127.0.0.1:8341"


@pytest.mark.parametrize("width", [70, 80, 120])
def test_every_replica_has_a_line_and_nothing_is_too_wide(width: int) -> None:
    text = lines(status_table(status_body(), URL, width), width)
    assert max(len(line) for line in text) <= width
    joined = "\n".join(text)
    for expected in (
        URL,
        VERSION,
        "2 of 4 replicas",
        "redis://127.0.0.1:6401",
        "embedding:0#1",
        "■ down",
        "older",
        "none",
    ):
        assert expected in joined


def test_counters_need_a_wide_terminal() -> None:
    assert not any("1,234" in line for line in lines(status_table(status_body(), URL, 80), 80))
    assert any("lookups 1,234" in line for line in lines(status_table(status_body(), URL, 120), 120))


def test_who_answers_nobody_is_named() -> None:
    quiet = "\n".join(lines(status_table(status_body(), URL, 120), 120))
    assert "left out" not in quiet
    body = status_body(silent={"sequence": ["rankmesh#sequence#ab12"]})
    text = "\n".join(lines(status_table(body, URL, 120), 120))
    assert "no answer from rankmesh#sequence#ab12: left out by " in text


def replica(state: str) -> dict[str, Any]:
    return {"name": "ingress", "target": 1, "replicas": [{"id": "ingress#1", "state": state}]}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"deployments": [replica("ready")]}, "ready"),
        ({"deployments": [replica("starting")]}, "starting"),
        ({"deployments": [replica("down")]}, "degraded"),
        ({"deployments": [{"name": "foundation", "target": 0, "replicas": []}]}, "ready"),
        ({"deployments": [{"name": "foundation", "target": 1, "replicas": []}]}, "degraded"),
        ({"deployments": [replica("ready")], "ready": False}, "not ready"),
        ({"deployments": [replica("ready")], "store": {"kind": "redis", "url": "r", "healthy": False}}, "degraded"),
    ],
)
def test_one_word_for_the_whole(changes: dict[str, Any], word: str) -> None:
    head = lines(status_table(status_body(**changes), URL, 80), 80)[0]
    assert [part.strip() for part in head.split("  ") if part.strip()][2] == word


def test_kernels_are_told_once_for_all_who_chose_alike() -> None:
    """Each replica has timed for itself: the figures of its reason are its own."""

    def station(name: str, execution: str) -> dict[str, Any]:
        replicas = [{"id": f"{name}#1", "state": "ready", "execution": execution}]
        return {"name": name, "target": 1, "replicas": replicas}

    stations = [station("sequence", "torch bfloat16 (probe: 207)"), station("full", "torch bfloat16 (probe: 208)")]
    kernels = [
        line for line in lines(status_table(status_body(deployments=stations), URL, 120), 120) if "probe" in line
    ]
    assert [line.strip() for line in kernels] == ["kernels  torch bfloat16 (probe: 207)"]
    stations.append(station("light", "reference float32 (search)"))
    text = " ".join(lines(status_table(status_body(deployments=stations), URL, 120), 120))
    assert "sequence, full: torch bfloat16 (probe: 207); light: reference float32 (search)" in text


def test_a_replica_shows_its_largest_counters_whole() -> None:
    counters = {f"counted_number_{index}": 1_000_000 + index for index in range(6)}
    ingress = {"id": "ingress#1", "state": "ready", "counters": counters}
    status = status_body(deployments=[{"name": "ingress", "target": 1, "replicas": [ingress]}])
    text = lines(status_table(status, URL, 120), 120)
    joined = " ".join(" ".join(text).split())
    for index in (5, 4, 3, 2):
        assert f"{1_000_000 + index:,}" in joined
    assert "…" not in joined
