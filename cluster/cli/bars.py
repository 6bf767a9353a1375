"""Bars of text cells: shares for scores, spans for a waterfall. Readable without colour."""

from __future__ import annotations

from rich.text import Text

from shared.schema.api import StageTime

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
_WORK = "━"
_WAIT = "─"


def share_bar(share: float, num_cells: int, style: str) -> Text:
    """Return a bar that fills ``share`` (clipped to 0..1) of ``num_cells`` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * num_cells * 8)
    full, part = divmod(eighths, 8)
    filled = _FULL * full + (_EIGHTHS[part] if part else "")
    return Text.assemble((filled, style), (" " * (num_cells - len(filled)), ""))


def span_bar(stage: StageTime, total_ms: float, num_cells: int) -> Text:
    """Return one bar of a waterfall on an axis of ``num_cells`` cells from 0 to ``total_ms``.

    Heavy cells are the time that the station computed, light ones the time it waited or its data travelled. A stage
    has at least one cell, however short.

    Args:
        stage: The stage.
        total_ms: Length of the axis, over 0.
        num_cells: Cells of the axis.
    """
    first = min(int(stage.start_ms / total_ms * num_cells), num_cells - 1)
    last = min(max(round((stage.start_ms + stage.duration_ms) / total_ms * num_cells), first + 1), num_cells)
    cells = last - first
    work_share = (
        1.0 if stage.compute_ms is None or stage.duration_ms <= 0 else min(stage.compute_ms / stage.duration_ms, 1.0)
    )
    work = round(cells * work_share)
    style = "bold cyan" if stage.critical else "bright_black"
    return Text.assemble((" " * first, ""), (_WORK * work + _WAIT * (cells - work), style))


def milliseconds(value: float) -> str:
    """Return a duration with about three digits that matter: ``0.31 ms``, ``14.9 ms``, ``131 ms``."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} ms"
