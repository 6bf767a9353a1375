"""Pictures of a run: every answer over time, and what the mesh held over time."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.chaos.outcome import Observed
from benchmarks.chaos.report import Report
from benchmarks.chaos.resources import Key, largest, totals
from benchmarks.chaos.slopes import UNITS, Resource
from training.chart import BOTTOM, COLORS, LEFT, TOP, line_chart, ticks
from training.chart import HEIGHT as CHART_HEIGHT
from training.chart import WIDTH as CHART_WIDTH

DOTS_MAX = 6_000
"""Of more answers the usual ones are thinned: whole, and in normal time."""

CURVE_POINTS_MAX = 400

_WIDTH, _HEIGHT, _RIGHT = 1_100, 420, 30
_COLORS = {"ok": "#0b6e4f", "degraded": "#c77700", "shed": "#1f6fb2"}
_BAD = "#b3261e"
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.fault{stroke:#6b4fa0;stroke-dasharray:3 3}"


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
    for each in thinned_answers(observed, report.normal_ms):
        color = _BAD if each.wrong else _COLORS.get(each.outcome, _BAD)
        parts.append(f'<circle cx="{x_of(each.due_s):.1f}" cy="{y_of(each.latency_ms):.1f}" r="2" fill="{color}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def thinned_answers(observed: Sequence[Observed], normal_ms: float, dots_max: int = DOTS_MAX) -> list[Observed]:
    """Return the answers that a picture shows: all unusual ones, and of the usual ones as many as there is room for."""
    usual = [each for each in observed if each.outcome == "ok" and each.latency_ms <= normal_ms and not each.wrong]
    if len(observed) <= dots_max:
        return list(observed)
    stride = -(-len(usual) // max(1, dots_max - (len(observed) - len(usual))))
    kept = set(map(id, usual[::stride])) if stride > 0 else set()
    hidden = set(map(id, usual)) - kept
    return [each for each in observed if id(each) not in hidden]


def resource_curves(series: dict[Key, list[tuple[float, float]]], report: Report) -> str:
    """Return a picture as SVG: one chart a resource, all processes of a part together, the largest parts of many."""
    charts = []
    resources: list[Resource] = ["rss", "descriptors", "threads", "object_store", "store", "connections"]
    for resource in resources:
        times_s, parts = totals(series, resource, CURVE_POINTS_MAX)
        if len(times_s) < 2:
            continue
        scale = 2.0**20 if UNITS[resource] == "bytes" else 1.0
        lines = {part: [value / scale for value in values] for part, values in largest(parts, len(COLORS))}
        unit = "MiB" if UNITS[resource] == "bytes" else UNITS[resource]
        title = f"{report.scenario}, seed {report.seed}: {resource} by part"
        charts.append(line_chart([at_s / 60 for at_s in times_s], lines, title, "minutes", unit))
    placed = [
        chart.replace("<svg ", f'<svg y="{number * CHART_HEIGHT}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}" ', 1)
        for number, chart in enumerate(charts)
    ]
    box = f"0 0 {CHART_WIDTH} {max(1, len(charts)) * CHART_HEIGHT}"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">', *placed, "</svg>"]) + "\n"
