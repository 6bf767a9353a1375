"""Where weights may be, and what the drivers of such places raise."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_WITHOUT_USERS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "r2"})
"""Schemes whose drivers take what stands before an ``@`` for a part of the bucket's name, and print it."""


def check_place(url: str) -> None:
    """Refuse a URL with credentials that its driver would not use but print.

    Raises:
        ValueError: it has some; they are not part of the message.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() in _WITHOUT_USERS and ("@" in rest or ":" in rest.partition("/")[0]):
        raise ValueError(
            f"{scheme}:// takes no credentials in the URL: give them in the driver's own variables or profile, and "
            f"the URL as {scheme}://bucket/prefix"
        )


def driver_errors() -> tuple[type[Exception], ...]:
    """Return what a driver raises when its store cannot be used: not all of them raise ``OSError`` alone."""
    botocore = sys.modules.get("botocore.exceptions")  # there once the driver of s3 is
    return (OSError,) if botocore is None else (OSError, botocore.BotoCoreError)


def local_file(root: str, path: str) -> Path:
    """Return a regular file of a version in a local store: links are followed, but not out of the folder.

    Args:
        root: Folder of the version.
        path: The file's path inside it, as ``check_path`` lets it pass.

    Raises:
        ValueError: it leads outside, in a circle, or is a pipe or device, which may never end.
        OSError: it is not there.
    """
    folder = Path(root).resolve()
    try:
        file = (folder / path).resolve()
    except RuntimeError as error:  # what pathlib makes of links that lead to one another
        raise ValueError("is a link that leads to itself") from error
    # The manifest refuses paths that leave the folder; a symbolic link on the way still could.
    if not file.is_relative_to(folder):
        raise ValueError("leads outside the version folder")
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("is no regular file")
    return file
