"""The report of a run: one JSON object, and tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.chaos.outcome import (
    LATE_SLACK_MS,
    Injected,
    Observed,
    degraded_by,
    ends_of,
    in_time_of,
    normal_ms,
    not_allowed,
    recovery_s,
    relapses,
)
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.schedule import Schedule

EXAMPLES_MAX = 20

_MIB = 2**20


@dataclass(slots=True)
class Report:
    """What ``rankmesh chaos run --json`` ends with.

    Args:
        scenario: Its name.
        seed: Of the schedule.
        requests: Due requests.
        lost: Not answered at all: refused, cut, silent for too long, or not sent as too many were in flight.
        wrong: Answers that the oracle has something against.
        server_errors: Answers with status 5xx, or 2xx without a body that can be read.
        not_allowed: Of the lost and the errors, those that no fault of their time was allowed to cost.
        shed: 429.
        late: Answers later than their deadline and ``LATE_SLACK_MS`` after they were sent.
        client_late_ms: By how much the client itself was late at most; above some 100 ms it was starved, and latencies
            say little.
        degraded: Marked answers.
        degraded_by: Part and reason -> marked answers.
        by_form: Answers of which only the form could be judged.
        recovery_s: Fault -> seconds until the mesh was itself again, None: not before the next fault.
        normal_ms: Latency up to which an answer counts as normal.
        whole_again: Whether every replica was back and answers were whole within the scenario's limit after the end.
        processes_before: Processes of the mesh before the first fault.
        processes_after: The same after the last.
        left_out: Faults that the swarm left out.
        faults: Each fault as it happened.
        examples: Some of what was wrong, lost or failed, in words.
        seconds: Length of the load.
        command: What repeats it.
        slopes: Resource and part -> how it grew, see ``Slope``; empty where nothing was sampled.
        figures: Pictures.
    """

    scenario: str
    seed: int
    requests: int
    lost: int
    wrong: int
    server_errors: int
    not_allowed: int
    shed: int
    late: int
    client_late_ms: float
    degraded: int
    degraded_by: dict[str, int]
    by_form: int
    recovery_s: dict[str, float | None]
    normal_ms: float
    whole_again: bool
    processes_before: int
    processes_after: int
    left_out: tuple[str, ...]
    faults: list[dict[str, Any]]
    examples: list[str]
    seconds: float
    command: str
    slopes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 when nothing was wrong, denied that must not be, or grew too fast, and the mesh is whole again."""
        failed = any(fault["error"] for fault in self.faults) or any(self.growing)
        return 1 if self.wrong or self.not_allowed or not self.whole_again or failed else 0

    @property
    def growing(self) -> list[str]:
        """What grew faster than the scenario allows, in words."""
        return [
            f"{name} grows by {slope['per_hour']:,.0f} {slope['unit']} an hour, allowed are {slope['limit']:,.0f}"
            for name, slope in self.slopes.items()
            if slope["exceeds"]
        ]

    def document(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class After:
    """The mesh once the load has ended.

    Args:
        whole: See ``Report.whole_again``.
        processes_before: Before the first fault.
        processes: Now.
    """

    whole: bool
    processes_before: int
    processes: int


def make_report(
    scenario: Scenario,
    seed: int,
    schedule: Schedule,
    observed: Sequence[Observed],
    faults: Sequence[Injected],
    after: After,
    command: str,
) -> Report:
    """Count what happened.

    Args:
        scenario: What was run.
        seed: With which seed.
        schedule: What was planned.
        observed: Every request, by due time.
        faults: Every fault, by time.
        after: The mesh afterwards.
        command: What repeats the run.

    Raises:
        ValueError: there was no whole answer before the first fault.
    """
    first_s = faults[0].at_s if faults else schedule.duration_s
    deadline_ms = scenario.load.deadline_ms
    limit_ms = normal_ms([each for each in observed if each.due_s < first_s - deadline_ms / 1e3], scenario.slack)
    ends = ends_of(faults, schedule.duration_s, scenario.pair_gap_s if scenario.num_pairs else 0.0)
    outcomes = Counter(each.outcome for each in observed)
    costs = Counter(each.cost for each in observed)
    bad = [each for each in observed if each.wrong or each.cost]
    report = Report(
        scenario=scenario.name,
        seed=seed,
        requests=len(observed),
        lost=costs["lost"],
        wrong=sum(bool(each.wrong) for each in observed),
        server_errors=costs["server_errors"],
        not_allowed=not_allowed(observed, faults, ends, deadline_ms / 1e3),
        shed=outcomes["shed"],
        late=sum(each.cost is None and each.answer_ms > deadline_ms + LATE_SLACK_MS for each in observed),
        client_late_ms=round(max((each.late_ms for each in observed), default=0.0), 1),
        degraded=outcomes["degraded"],
        degraded_by=degraded_by(observed),
        by_form=sum(each.by_form for each in observed),
        recovery_s={},
        normal_ms=round(limit_ms, 1),
        whole_again=after.whole,
        processes_before=after.processes_before,
        processes_after=after.processes,
        left_out=schedule.left_out,
        faults=[_fault_document(fault, observed, end_s, limit_ms) for fault, end_s in zip(faults, ends, strict=True)],
        examples=[f"at {each.due_s:.1f} s: {(each.wrong or (each.detail,))[0]}" for each in bad[:EXAMPLES_MAX]],
        seconds=round(schedule.duration_s, 1),
        command=command,
    )
    report.recovery_s = {fault["label"]: fault["recovery_s"] for fault in report.faults}
    return report


def report_view(report: Report) -> Group:
    """Return tables for a terminal."""
    table = Table(title=f"{report.scenario}, seed {report.seed}: {report.requests} requests in {report.seconds:.0f} s")
    for name in (
        "fault",
        "at s",
        "recovery s",
        "later",
        "whole",
        "marked",
        "shed",
        "lost",
        "5xx",
        "wrong",
        "slowest ms",
    ):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for fault in report.faults:
        recovery = report.recovery_s[fault["label"]]
        table.add_row(
            fault["label"], f"{fault['at_s']:.1f}", "-" if recovery is None else f"{recovery:.1f}",
            *(str(fault[name]) for name in ("relapses", "ok", "degraded", "shed", "lost", "server_errors", "wrong")),
            f"{fault['slowest_ms']:.0f}",
        )  # fmt: skip
    words = [
        f"lost {report.lost}, wrong {report.wrong}, 5xx {report.server_errors} (not allowed {report.not_allowed}), "
        f"shed {report.shed}, late {report.late}, marked {report.degraded}",
        f"normal up to {report.normal_ms:.0f} ms, client late by up to {report.client_late_ms:.0f} ms; "
        f"processes {report.processes_before} before, "
        f"{report.processes_after} after; {'whole again' if report.whole_again else 'NOT whole again'}",
        *(f"marked {count}: {why}" for why, count in report.degraded_by.items()),
        *(f"[{fault['label']}] {fault['error']}" for fault in report.faults if fault["error"]),
        *report.examples,
        *([f"left out: {', '.join(report.left_out)}"] if report.left_out else []),
        *report.growing,
        *(f"picture: {figure}" for figure in report.figures),
        f"again: {report.command}",
    ]
    tables = [table, *([_slope_table(report)] if report.slopes else [])]
    return Group(*tables, Text("\n".join(words)))


def _slope_table(report: Report) -> Table:
    table = Table(title="growth of one process, restarts left out")
    for name in ("resource", "part", "processes", "minutes", "level", "an hour", "share an hour", "allowed"):
        table.add_column(name, justify="left" if name in ("resource", "part") else "right")
    for name, slope in report.slopes.items():
        resource, _, part = name.partition(" ")
        in_bytes = slope["unit"] == "bytes"
        table.add_row(
            resource, part, str(slope["series"]), f"{slope['span_s'] / 60:.0f}", _amount(slope["level"], in_bytes),
            _amount(slope["per_hour"], in_bytes), f"{slope['share_per_h']:+.1%}",
            "-" if slope["limit"] is None else _amount(slope["limit"], in_bytes),
            style="red" if slope["exceeds"] else "",
        )  # fmt: skip
    return table


def _amount(value: float, in_bytes: bool) -> str:
    return f"{value / _MIB:,.1f} MiB" if in_bytes else f"{value:,.1f}"


def _fault_document(fault: Injected, observed: Sequence[Observed], end_s: float, limit_ms: float) -> dict[str, Any]:
    window = in_time_of(observed, fault.at_s, end_s, limit_ms)
    outcomes, costs = Counter(each.outcome for each in window), Counter(each.cost for each in window)
    recovered_s = recovery_s(observed, fault.at_s, end_s, limit_ms)
    return {
        "label": fault.planned.label,
        "at_s": round(fault.at_s, 2),
        "healed_s": _rounded(fault.healed_s),
        "what": fault.what,
        "error": fault.error,
        "recovery_s": _rounded(recovered_s),
        "relapses": relapses(window, fault.at_s, recovered_s),
        "ok": outcomes["ok"],
        "degraded": outcomes["degraded"],
        "shed": outcomes["shed"],
        "lost": costs["lost"],
        "server_errors": costs["server_errors"],
        "wrong": sum(bool(each.wrong) for each in window),
        "slowest_ms": round(max((each.latency_ms for each in window), default=0.0), 1),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
