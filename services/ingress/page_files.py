"""The page behind ``GET /``: a few static files, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("page")

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file.

    Args:
        content: Its bytes.
        media_type: Its content type.
    """

    content: bytes
    media_type: str


def load_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Return path -> file: ``/`` for the page itself, ``/page/<name>`` for what it loads; empty without a page."""
    files = {
        f"/page/{path.name}": PageFile(path.read_bytes(), _MEDIA_TYPES[path.suffix])
        for path in sorted(folder.glob("*"))
        if path.suffix in _MEDIA_TYPES
    }
    if index := files.pop("/page/index.html", None):
        files["/"] = index
    return files
