"""Publishes a version that lies elsewhere: every chunk checked on the way, the manifest last."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from shared.clock import Clock
from shared.errors import WeightsError
from shared.weights.loader import LoadConfig, OnProgress, load_version
from shared.weights.manifest import MANIFEST_NAME, Manifest
from shared.weights.store import WeightStore


async def copy_version(
    source: WeightStore,
    version: str,
    target: WeightStore,
    config: LoadConfig | None = None,
    progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> str:
    """Copy a version from one store into another, name, times and checksums unchanged.

    Into a local store the files grow beside the versions and the folder is renamed when all is right; a copy that was
    cut goes on where it stopped. Into another store they are loaded into a temporary folder first, then uploaded.

    Args:
        source: Store that holds the version.
        version: The version.
        target: Store that is to hold it.
        config: Streams, limits, repeats of the reads.
        progress: Is told after each chunk and each file.
        clock: For waits between repeats.

    Returns:
        The version.

    Raises:
        WeightsError: there is no such version, a part of it is wrong, the target holds another content under its name,
            or refuses; nothing is listed there then.
    """
    if isinstance(target.fs, LocalFileSystem):
        await load_version(source, version, Path(target.root), config, progress, clock)
        return version
    manifest = source.open(version).manifest
    remote = f"{target.root}/{version}"
    if target.fs.exists(f"{remote}/{MANIFEST_NAME}"):
        if target.open(version).manifest != manifest:
            raise _error(version, "the target holds another content under this name")
        return version
    folder = tempfile.mkdtemp(prefix="rankmesh-copy-")
    try:
        await load_version(source, version, Path(folder), config, progress, clock)
        _upload(Path(folder, version), target, manifest)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return version


def _upload(folder: Path, target: WeightStore, manifest: Manifest) -> None:
    remote = f"{target.root}/{manifest.version}"
    try:
        for entry in manifest.entries():
            path = f"{remote}/{entry.path}"
            target.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            target.fs.put_file(str(folder / entry.path), path)
            if (size := int(target.fs.info(path)["size"])) != entry.bytes:
                raise _error(manifest.version, f"{entry.path} arrived with {size} of {entry.bytes} bytes")
        target.fs.pipe_file(f"{remote}/{MANIFEST_NAME}", manifest.encode())
    except OSError as error:
        raise _error(manifest.version, f"cannot be uploaded: {error}") from error


def _error(version: str, reason: str) -> WeightsError:
    return WeightsError(f"weights {version}: {reason}", version=version, file=MANIFEST_NAME)
