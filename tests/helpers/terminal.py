"""What a drawing looks like on a terminal of some width, without colours."""

from __future__ import annotations

from rich.console import Console, RenderableType


def lines(drawing: RenderableType, width: int) -> list[str]:
    """Return the printed lines."""
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(drawing)
    return capture.get().splitlines()
