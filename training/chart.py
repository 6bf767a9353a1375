"""A line chart as SVG text, without a plotting library: axes, grid, lines, names at their ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 50, 50
COLORS: Final = ("#0b6e4f", "#1f6fb2", "#c77700", "#b3261e", "#6b4fa0", "#444444")
_STYLE: Final = "text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"


def line_chart(xs: Sequence[float], lines: Mapping[str, Sequence[float]], title: str, x_name: str, y_name: str) -> str:
    """Return a chart.

    Args:
        xs: At least two ascending positions.
        lines: Name -> one finite value a position.
        title: Above the chart.
        x_name: Below it.
        y_name: At its upper left.

    Raises:
        ValueError: there are fewer than two positions, no line, or a line does not fit.
    """
    values = [value for line in lines.values() for value in line]
    if len(xs) < 2 or not lines or any(len(line) != len(xs) for line in lines.values()):
        raise ValueError(f"a chart needs two positions and lines of that length, has {len(xs)} and {len(lines)} lines")
    if not all(map(math.isfinite, [*values, *xs])):
        raise ValueError("a chart needs finite values")
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    low, high = low - 0.05 * spread, high + 0.05 * spread

    def x_of(value: float) -> float:
        return LEFT + (value - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(WIDTH - RIGHT + LEFT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">{escape(y_name)}</text>',
    ]
    heights = [(tick, y_of(tick)) for tick in ticks(low, high)]
    parts += [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick, y in heights
    ]
    parts += [
        f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks(xs[0], xs[-1])
    ]
    labels = _spread({name: y_of(line[-1]) for name, line in lines.items()})
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, line, strict=True))
        parts.append(f'<polyline class="line" stroke="{color}" points="{points}"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{labels[name] + 4:.1f}" style="fill:{color}">'
            f"{escape(name)} {line[-1]:.4f}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, num_max: int = 6) -> list[float]:
    """Return at most about ``num_max`` round positions within a range."""
    step = 10 ** math.floor(math.log10((high - low) / num_max))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= num_max)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _spread(places: Mapping[str, float], gap: float = 16.0) -> dict[str, float]:
    """Move labels down until none covers another."""
    moved: dict[str, float] = {}
    last = -math.inf
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        last = moved[name] = max(place, last + gap)
    return moved
