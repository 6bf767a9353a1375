"""A drawing of a plan: a bar of bytes and one of time for every card, as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

from models.embedding.planner.config import size
from models.embedding.planner.report import Report
from models.embedding.planner.search import Plan

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_OTHER = "#bab0ac"
_ROW, _LEFT, _BAR, _GAP, _TOP = 22, 70, 360, 40, 46


def draw(plan: Plan, report: Report) -> str:
    """Return the plan as an SVG document: on the left what each card holds, by table, on the right its time."""
    largest = sorted(report.groups, key=lambda group: -group.total_bytes)[: len(_COLOURS)]
    colours = {group.name: colour for group, colour in zip(largest, _COLOURS, strict=False)}
    room = plan.config.card.table_bytes
    slowest = max(report.times_us)
    lines = [
        _text(_LEFT, 30, f"bytes, of {size(room)} a card"),
        _text(_LEFT + _BAR + _GAP, 30, f"time a request, hottest {slowest:.1f} us"),
    ]
    for card in range(plan.config.num_cards):
        top = _TOP + card * _ROW
        lines.append(_text(8, top + 14, f"card {card}"))
        lines.append(_rect(_LEFT, top, _BAR, "#eee"))
        left = float(_LEFT)
        for name, held in _held(plan, card).items():
            width = held / room * _BAR
            lines.append(_rect(left, top, width, colours.get(name, _OTHER), f"{name}: {size(held)}"))
            left += width
        wide = report.times_us[card] / slowest * _BAR
        lines.append(_rect(_LEFT + _BAR + _GAP, top, wide, "#4e79a7", f"{report.times_us[card]:.1f} us"))
    height = _TOP + plan.config.num_cards * _ROW + 30
    left = _LEFT
    for name, colour in colours.items():
        lines.append(f'<rect x="{left}" y="{height - 18}" width="10" height="10" fill="{colour}"/>')
        lines.append(_text(left + 14, height - 9, name))
        left += 24 + 7 * len(name)
    total = _LEFT + 2 * _BAR + _GAP + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{total}" height="{height}" fill="white"/>', *lines, "</svg>"]) + "\n"


def _held(plan: Plan, card: int) -> dict[str, int]:
    """Return the bytes that a card holds by group of tables, largest first."""
    held: dict[str, int] = {}
    for choice in plan.choices:
        base, _, index = choice.table.name.rpartition(".")
        name = base if base and index.isdigit() else choice.table.name
        held[name] = held.get(name, 0) + choice.loads[card].resident_bytes
    return dict(sorted(((name, num) for name, num in held.items() if num), key=lambda item: -item[1]))


def _rect(left: float, top: float, width: float, colour: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}">{inside}</rect>'


def _text(left: float, base: float, words: str) -> str:
    return f'<text x="{left:.0f}" y="{base:.0f}" font-size="12">{escape(words)}</text>'
