"""What is written down of the rooflines: a table in every kernel's README, and one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernels.roofline.model import H200_SXM
from kernels.roofline.picture import draw
from kernels.roofline.tables import COLUMNS, KERNELS, Table, cells, roofs

COMMAND = "python -m kernels.gpu_check --roofline --write"
BEGIN, END = f"<!-- roofline: written by {COMMAND} -->", "<!-- roofline ends -->"
PICTURE = KERNELS.parent / "docs" / "kernels" / "roofline.svg"


def pages(tables: Mapping[str, Table], folder: Path = KERNELS, picture: Path = PICTURE) -> dict[Path, str]:
    """Return every file that shows rooflines as it must be: path -> text.

    Raises:
        ValueError: a README has no place for its roofline.
    """
    readmes = {folder / name / "README.md": table for name, table in tables.items()}
    wanted = {path: with_section(path.read_text(encoding="utf-8"), table, str(path)) for path, table in readmes.items()}
    return {**wanted, picture: draw(tables, H200_SXM)}


def write(wanted: Mapping[Path, str]) -> list[Path]:
    """Bring files up to date; return those that changed."""
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return changed


def section(table: Table) -> str:
    """Return what stands in a README between the two marks, marks included."""
    device = table.device
    used = {work.precision for work in table.works.values() if work.flops}
    rows = [
        f"What {device.name} allows at best: {roofs(device, used)}. [How to read it](../../docs/kernels.md#rooflines).",
        "",
        f"| {' | '.join(('shape', *COLUMNS))} |",
        f"| --- {'| --- ' * len(COLUMNS)}|",
        *(f"| {' | '.join((shape, *cells(work, device)))} |" for shape, work in table.works.items()),
    ]
    return "\n".join([BEGIN, *rows, END])


def with_section(readme: str, table: Table, name: str) -> str:
    """Return a README with its roofline as it must be.

    Raises:
        ValueError: the README has not exactly one place for it.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"{name} must have one line {BEGIN!r} and one {END!r} behind it")
    return f"{before}{section(table)}{after}"
