"""The report of a run: one JSON object, tables for a terminal, and a picture of every answer over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.chaos.outcome import (
    LATE_SLACK_MS,
    Injected,
    Observed,
    degraded_by,
    ends_of,
    normal_ms,
    not_allowed,
    recovery_s,
    relapses,
)
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.schedule import Schedule
from training.chart import BOTTOM, LEFT, TOP, ticks

EXAMPLES_MAX = 20

_WIDTH, _HEIGHT, _RIGHT = 1_100, 420, 30
_COLORS = {"ok": "#0b6e4f", "degraded": "#c77700", "shed": "#1f6fb2"}
_BAD = "#b3261e"
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.fault{stroke:#6b4fa0;stroke-dasharray:3 3}"


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
    figure: str = field(default="")

    @property
    def exit_code(self) -> int:
        """0 when nothing was wrong, nothing was denied that must not be, and the mesh is whole again."""
        failed = any(fault["error"] for fault in self.faults)
        return 1 if self.wrong or self.not_allowed or not self.whole_again or failed else 0

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
        *([f"picture: {report.figure}"] if report.figure else []),
        f"again: {report.command}",
    ]
    return Group(table, Text("\n".join(words)))


def timeline(report: Report, observed: Sequence[Observed]) -> str:
    """Return a picture as SVG: every request at its due time and latency, every fault as a line with its name."""
    high = max([report.normal_ms * 2, *(each.latency_ms for each in observed)])

    def x_of(time_s: float) -> float:
        return LEFT + time_s / report.seconds * (_WIDTH - LEFT - _RIGHT)

    def y_of(latency_ms: float) -> float:
        return _HEIGHT - BOTTOM - latency_ms / high * (_HEIGHT - TOP - BOTTOM)

    title = f"{report.scenario}, seed {report.seed}: latency in ms by time in s"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}; green whole, orange marked, red neither</text>',
    ]
    for tick in ticks(0, high):
        y = y_of(tick)
        parts += [
            f'<line class="grid" x1="{LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>',
        ]
    parts += [
        f'<text x="{x_of(tick):.1f}" y="{_HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks(0, report.seconds, 12)
    ]
    for fault in report.faults:
        x = x_of(fault["at_s"])
        parts += [
            f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{_HEIGHT - BOTTOM}"/>',
            f'<text transform="translate({x + 4:.1f} {TOP}) rotate(90)">{escape(fault["label"])}</text>',
        ]
    for each in observed:
        color = _BAD if each.wrong else _COLORS.get(each.outcome, _BAD)
        parts.append(f'<circle cx="{x_of(each.due_s):.1f}" cy="{y_of(each.latency_ms):.1f}" r="2" fill="{color}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _fault_document(fault: Injected, observed: Sequence[Observed], end_s: float, limit_ms: float) -> dict[str, Any]:
    window = [each for each in observed if fault.at_s <= each.due_s < end_s]
    outcomes, costs = Counter(each.outcome for each in window), Counter(each.cost for each in window)
    recovered_s = recovery_s(observed, fault.at_s, end_s, limit_ms)
    return {
        "label": fault.planned.label,
        "at_s": round(fault.at_s, 2),
        "healed_s": _rounded(fault.healed_s),
        "what": fault.what,
        "error": fault.error,
        "recovery_s": _rounded(recovered_s),
        "relapses": relapses(observed, fault.at_s, end_s, recovered_s),
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
