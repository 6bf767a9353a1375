"""Faults of the chaos lab in a real mesh, under a steady load whose every answer is judged."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos.report import Report, make_report
from benchmarks.chaos.run import Runner, with_store
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.schedule import make_schedule
from benchmarks.chaos.victims import victims
from benchmarks.site import Site
from cluster.config import MeshConfig
from cluster.local import Mesh
from shared.clock import SystemClock


class Lab:
    """Runs short scenarios in the mesh of the session."""

    def __init__(self, hosted: tuple[Mesh, Site], deployment: MeshConfig, lines: list[str]) -> None:
        self.mesh, self.site = hosted
        self._config = with_store(deployment, self.mesh)
        self._lines = lines

    async def run(self, *faults: dict[str, Any], spacing_s: float = 14.0) -> Report:
        document = {"name": "lab", "calm_s": 4, "spacing_s": spacing_s, "jitter_s": 0, "shuffle": False}
        scenario = Scenario.model_validate({**document, "faults": list(faults)})
        schedule = make_schedule(scenario, 0)
        runner = Runner(scenario, schedule, self.mesh, self.site, self._config, SystemClock(), self._lines.append)
        observed, injected, after = await runner.run()
        report = make_report(scenario, 0, schedule, observed, injected, after, "pytest")
        self._lines += [f"{label}: recovered in {recovery} s" for label, recovery in report.recovery_s.items()]
        return report

    def pids(self, target: str) -> list[int]:
        return [process.pid for process in victims(target, self.mesh)]


@pytest.fixture
def lab(hosted: tuple[Mesh, Site], deployment: MeshConfig, report: list[str]) -> Lab:
    return Lab(hosted, deployment, report)


def check(report: Report) -> None:
    """Nothing was denied, nothing wrong, and the mesh is whole again; how soon is a figure, not a test."""
    assert (report.lost, report.wrong, report.server_errors) == (0, 0, 0), report.examples
    assert report.exit_code == 0, report.document()


async def test_a_replica_that_was_silent_is_used_again(lab: Lab) -> None:
    before = lab.pids("embedding:1")
    report = await lab.run({"kind": "stop", "target": "embedding:1", "hold_s": 5})
    check(report)
    assert report.degraded > 0, "it was silent"
    assert {mark.partition(": ")[0] for mark in report.degraded_by} <= {"embedding:1", "deadline"}
    assert lab.pids("embedding:1") == before, "answers are whole again, so the same process is used again"


async def test_without_its_controller_the_mesh_serves_on_and_the_next_one_heals_it(lab: Lab) -> None:
    before = lab.pids("controller")
    report = await lab.run({"kind": "kill", "target": "controller"}, {"kind": "kill", "target": "embedding:0"})
    check(report)
    assert lab.pids("controller") != before
    assert report.faults[0]["degraded"] == 0, "nobody missed it"
    assert report.faults[1]["degraded"] > 0, "and then the next controller replaced it"


async def test_a_store_that_falls_silent_and_one_that_dies_cost_marks_at_most(lab: Lab) -> None:
    report = await lab.run({"kind": "stop", "target": "store", "hold_s": 3}, {"kind": "kill", "target": "store"})
    check(report)


async def test_damaged_weights_never_serve(lab: Lab) -> None:
    report = await lab.run({"kind": "corrupt_weights", "target": "weights", "hold_s": 6})
    check(report)
    assert report.degraded == 0
