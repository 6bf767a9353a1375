"""The roofline of a device with the kernels' shapes under it, as SVG text; both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.sax.saxutils import escape

from kernels.roofline.model import Device, Point
from kernels.roofline.tables import Table

WIDTH, HEIGHT = 920, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 56, 50
COLOURS = (
    "#0b6e4f", "#1f6fb2", "#c77700", "#b3261e", "#6b4fa0", "#444444",
    "#17a2b8", "#a0522d", "#d63384", "#7a9a01", "#f2a900", "#8899aa",
)  # fmt: skip
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#e4e4e4}.roof{fill:none;stroke:#222;stroke-width:1.5}"
    "circle{stroke:#fff;stroke-width:1}"
)


def draw(tables: Mapping[str, Table], device: Device) -> str:
    """Return the picture of all kernels of a device.

    A shape stands at its intensity on the roof that bounds it. Shapes without FLOPs have no place on a logarithmic
    axis; their kernels are named below the others.

    Raises:
        ValueError: no shape of the device has FLOPs, or there are more kernels than colours.
    """
    points = {
        name: [(shape, device.point(work)) for shape, work in table.works.items()]
        for name, table in tables.items()
        if table.device is device
    }
    seen = [point for several in points.values() for _, point in several if point.work.flops]
    if not seen or len(points) > len(COLOURS):
        raise ValueError(f"a picture needs FLOPs and at most {len(COLOURS)} kernels, has {len(points)}")
    peak = max(device.flops_per_s.values())
    intensities = [point.work.intensity for point in seen]
    axes = _Axes(
        _decades(min(intensities), max(*intensities, peak / device.bytes_per_s)),
        _decades(min(point.flops_per_s for point in seen), peak),
    )
    title = f"Roofline of {device.name}: what the kernels' shapes allow at best"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(WIDTH - RIGHT + LEFT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">FLOP a byte</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">TFLOP/s</text>',
        *axes.grid(),
        *_roofs(device, axes),
        *_marks(points, axes),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axes:
    """Both logarithmic axes: from powers of ten to powers of ten."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.xs, self.ys = xs, ys

    def x(self, value: float) -> float:
        return LEFT + _share(value, self.xs) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - _share(value, self.ys) * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> list[str]:
        """Return a line and a number at every power of ten."""
        across = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(tick):.1f}" y2="{self.y(tick):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick * 1e-12:,g}</text>'
            for tick in _ticks(self.ys)
        ]
        return across + [
            f'<line class="grid" x1="{self.x(tick):.1f}" x2="{self.x(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:,g}</text>'
            for tick in _ticks(self.xs)
        ]


def _roofs(device: Device, axes: _Axes) -> list[str]:
    """Return the memory's slope up to the highest rate, and each rate from its ridge on."""
    peak = max(device.flops_per_s.values())
    low = max(axes.xs[0], axes.ys[0] / device.bytes_per_s)
    slope = [(low, low * device.bytes_per_s), (peak / device.bytes_per_s, peak)]
    roofs = [_polyline(slope, axes)]
    names: dict[float, list[str]] = {}
    for precision, rate in device.flops_per_s.items():
        names.setdefault(rate, []).append(precision)
    for rate, precisions in names.items():
        roofs.append(_polyline([(rate / device.bytes_per_s, rate), (axes.xs[1], rate)], axes))
        roofs.append(
            f'<text x="{WIDTH - RIGHT - 4}" y="{axes.y(rate) - 6:.1f}" text-anchor="end">'
            f"{', '.join(precisions)} {rate * 1e-12:,.0f}</text>"
        )
    middle = low * (peak / device.bytes_per_s / low) ** 0.12
    x, y = axes.x(middle) + 10, axes.y(middle * device.bytes_per_s) + 14
    return [*roofs, f'<text x="{x:.1f}" y="{y:.1f}">{device.bytes_per_s * 1e-12:g} TB/s</text>']


def _polyline(points: list[tuple[float, float]], axes: _Axes) -> str:
    places = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
    return f'<polyline class="roof" points="{places}"/>'


def _marks(points: Mapping[str, list[tuple[str, Point]]], axes: _Axes) -> list[str]:
    """Return a mark for every shape, with the shape in words under the pointer, and the names at the right."""
    parts = []
    left, top = WIDTH - RIGHT + 16, TOP + 8
    for number, (name, several) in enumerate(points.items()):
        colour = COLOURS[number]
        has_flops = any(point.work.flops for _, point in several)
        for shape, point in several:
            if point.work.flops:
                text = f"{name} {shape}: {point.work.intensity:.3g} FLOP/B, {point.flops_per_s * 1e-12:.3g} TFLOP/s"
                place = f'cx="{axes.x(point.work.intensity):.1f}" cy="{axes.y(point.flops_per_s):.1f}"'
                parts.append(f'<circle {place} r="5.5" fill="{colour}"><title>{escape(text)}</title></circle>')
        if has_flops:
            parts.append(f'<circle cx="{left}" cy="{top - 4}" r="5.5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 12}" y="{top}">{escape(name if has_flops else name + ": no FLOPs")}</text>')
        top += 20
    return parts


def _decades(low: float, high: float) -> tuple[float, float]:
    """Return the powers of ten around a range."""
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def _ticks(between: tuple[float, float]) -> list[float]:
    low, high = (round(math.log10(value)) for value in between)
    return [10.0**power for power in range(low, high + 1)]


def _share(value: float, between: tuple[float, float]) -> float:
    low, high = map(math.log10, between)
    return (math.log10(value) - low) / (high - low)
