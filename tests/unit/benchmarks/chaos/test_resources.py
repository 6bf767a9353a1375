from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import cast

import pytest

from benchmarks.chaos.resources import (
    LAB,
    Key,
    ResourcePlan,
    Resources,
    held_by,
    largest,
    parse_object_store,
    part_of,
    totals,
)
from benchmarks.chaos.slopes import Bound
from cluster.local import Mesh
from shared.clock import ManualClock

DUMP = """NodeManager:
InitialConfigResources: {object_store_memory: 2.68435e+08, CPU: 2}
Local id: 29 Local resources: {"total":{CPU: [20000], object_store_memory: [2684354560000]}, \
"available": {object_store_memory: [2672105790000], CPU: [20000]}} is_draining: 0 Cluster resources (at most 20 nodes \
are shown): node id: 29{"total":{object_store_memory: 1}, "available": {object_store_memory: 1}}
LocalObjectManager:
"""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("ray::ServeReplica:rankmesh:embedding-1.handle_request",), "embedding:1"),
        (("ray::ServeReplica:rankmesh:ranking-full",), "ranking:full"),
        (("ray::ServeController.listen_for_change",), "ServeController"),
        (("ray::IDLE",), "IDLE"),
        (("/ray/raylet", "--head"), "raylet"),
        (("/usr/bin/python", "-m", "cluster.owner", "14", "12"), "cluster.owner"),
        (("/usr/bin/python", "-u", "/ray/dashboard/agent.py", "--x"), "dashboard/agent"),
    ],
)
def test_a_process_is_named_by_the_part_it_plays(words: tuple[str, ...], part: str) -> None:
    assert part_of(words) == part


def test_what_this_process_holds() -> None:
    before = held_by(os.getpid())
    assert before is not None
    assert 2**20 < before.rss < 2**36
    assert before.threads >= 1
    reader, writer = os.pipe()
    after = held_by(os.getpid())
    os.close(reader)
    os.close(writer)
    assert after is not None
    assert after.descriptors == before.descriptors + 2


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert held_by(child.pid) is None, "it waits for its parent"
    child.wait()
    assert held_by(child.pid) is None


def test_the_object_store_is_what_the_raylet_has_given_away() -> None:
    assert parse_object_store(DUMP) == 1_224_877
    assert parse_object_store("NodeManager:\n") is None


def test_processes_of_a_part_are_added_up_by_time() -> None:
    series: dict[Key, list[tuple[float, float]]] = {
        ("rss", "ingress", 1): [(0.0, 10.0), (10.0, 11.0)],
        ("rss", "ingress", 2): [(10.0, 20.0), (20.0, 21.0)],
        ("rss", "store", 3): [(0.0, 5.0), (10.0, 5.0), (20.0, 5.0)],
        ("threads", "store", 3): [(0.0, 1.0)],
    }
    times, parts = totals(series, "rss", 100)
    assert times == [0.0, 10.0, 20.0]
    assert parts == {"ingress": [10.0, 31.0, 21.0], "store": [5.0, 5.0, 5.0]}
    assert [part for part, _ in largest(parts, 1)] == ["ingress"]
    assert totals(series, "rss", 2)[0] == [0.0, 20.0]


def test_the_lab_is_shown_and_not_judged() -> None:
    plan = ResourcePlan(settle_s=20.0, span_min_s=10.0, bounds={"rss": Bound(share_per_h=0.0, floor_per_h=1.0)})
    resources = Resources(cast(Mesh, None), None, plan, ManualClock(), io.BytesIO())
    for part in ("sequence", LAB):
        resources.series["rss", part, 1] = [(10.0 * number, 1e8 + 1e5 * number) for number in range(9)]
    by_part = {slope.part: slope for slope in resources.slopes()}
    assert by_part["sequence"].exceeds
    assert not by_part[LAB].exceeds
    assert by_part[LAB].per_hour == by_part["sequence"].per_hour
    assert by_part["sequence"].num_samples == 7, "the first are left out: it settles"
