from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import orjson
import pytest
from rich.console import Console

from benchmarks.chaos.outcome import Injected, Observed
from benchmarks.chaos.picture import resource_curves, thinned_answers, timeline
from benchmarks.chaos.report import After, Report, make_report, report_view
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.schedule import make_schedule

COMMAND = "rankmesh chaos run trial.yaml --seed 4"


def trial(
    changes: dict[int, Observed] | None = None, *, whole: bool = True, error: str = ""
) -> tuple[Report, list[Observed]]:
    scenario = Scenario.model_validate(
        {"name": "trial", "calm_s": 5, "spacing_s": 10, "jitter_s": 0, "faults": [{"kind": "kill", "target": "store"}]}
    )
    schedule = make_schedule(scenario, 4)
    observed = [(changes or {}).get(n, Observed(n / 4, 50.0, "ok")) for n in range(60)]
    faults = [Injected(each, each.at_s, "process 7", error=error) for each in schedule.faults]
    return make_report(scenario, 4, schedule, observed, faults, After(whole, 20, 20), COMMAND), observed


def test_the_object_has_what_is_promised() -> None:
    report, _ = trial({24: Observed(6.0, 50.0, "degraded", (("sequence", "store down"),))})
    document = orjson.loads(orjson.dumps(report.document()))
    promised = {
        name: document[name] for name in ("requests", "lost", "wrong", "server_errors", "degraded", "recovery_s")
    }
    assert promised == {
        "requests": 60, "lost": 0, "wrong": 0, "server_errors": 0, "degraded": 1, "recovery_s": {"kill store": 1.25},
    }  # fmt: skip
    assert document["degraded_by"] == {"sequence: store down": 1}
    assert document["command"] == COMMAND
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("bad", "counted"),
    [
        (Observed(6.0, 50.0, "ok", wrong=("user 3, sent 4",)), "wrong"),
        (Observed(6.0, 9_000.0, "hung", detail="ReadTimeout"), "lost"),
        (Observed(6.0, 50.0, "failed", detail="internal"), "server_errors"),
    ],
)
def test_a_wrong_a_lost_and_a_failed_answer_each_fail_the_run(bad: Observed, counted: str) -> None:
    report, _ = trial({24: bad})
    assert getattr(report, counted) == 1
    assert report.exit_code == 1
    assert report.examples == [f"at 6.0 s: {(bad.wrong or (bad.detail,))[0]}"]


def test_a_mesh_that_stays_broken_and_a_fault_that_did_not_happen_fail_the_run() -> None:
    assert trial(whole=False)[0].exit_code == 1
    assert trial(error="no process of store runs")[0].exit_code == 1


def test_late_answers_are_counted() -> None:
    report, _ = trial({30: Observed(7.5, 1_751.0, "ok"), 31: Observed(7.75, 1_749.0, "ok")})
    assert report.late == 1
    assert report.client_late_ms == 0.0


def test_what_the_client_was_late_is_not_the_meshs_fault() -> None:
    report, _ = trial({30: Observed(7.5, 3_000.0, "ok", late_ms=2_000.0)})
    assert report.late == 0
    assert report.client_late_ms == 2_000.0


def test_the_tables_show_fault_recovery_and_how_to_repeat_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    console.print(report_view(trial({24: Observed(6.0, 50.0, "degraded", (("sequence", "late"),))})[0]))
    shown = stream.getvalue()
    assert "kill store" in shown
    assert "1.2" in shown
    assert "marked 1: sequence: late" in shown
    assert f"again: {COMMAND}" in shown


def test_the_picture_has_every_answer_and_every_fault() -> None:
    report, observed = trial({24: Observed(6.0, 50.0, "failed", detail="<&>")})
    root = ElementTree.fromstring(timeline(report, observed))
    space = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{space}circle")
    assert len(circles) == 60
    assert len({circle.get("fill") for circle in circles}) == 2
    assert [text.text for text in root.findall(f"{space}text") if text.get("transform")] == ["kill store"]


def test_what_grows_too_fast_fails_the_run_and_is_named() -> None:
    report, _ = trial()
    slope = {"unit": "bytes", "level": 1e8, "per_hour": 3e7, "share_per_h": 0.3, "series": 2, "span_s": 900.0}
    report.slopes = {"rss sequence": {**slope, "limit": 1e7, "exceeds": True}}
    assert report.exit_code == 1
    assert report.growing == ["rss sequence grows by 30,000,000 bytes an hour, allowed are 10,000,000"]
    stream = io.StringIO()
    Console(file=stream, width=200).print(report_view(report))
    assert "28.6 MiB" in stream.getvalue()
    report.slopes = {"rss sequence": {**slope, "limit": None, "exceeds": False}}
    assert report.exit_code == 0


def test_a_picture_of_many_answers_keeps_all_that_are_unusual() -> None:
    observed = [Observed(n / 4, 50.0 if n % 50 else 900.0, "ok" if n % 70 else "degraded") for n in range(2_000)]
    shown = thinned_answers(observed, 100.0, dots_max=300)
    assert len(shown) <= 301
    unusual = [each for each in observed if each.outcome != "ok" or each.latency_ms > 100.0]
    assert [each for each in shown if each.outcome != "ok" or each.latency_ms > 100.0] == unusual
    assert thinned_answers(observed, 100.0, dots_max=2_000) == observed


def test_the_curves_are_one_chart_a_resource() -> None:
    report, _ = trial()
    samples = [(10.0 * number, 1e8 + number) for number in range(5)]
    root = ElementTree.fromstring(
        resource_curves({("rss", "store", 1): samples, ("threads", "store", 1): samples}, report)
    )
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 2
