"""A process that carries the id of a mesh, as its owner does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.processes import MESH_VARIABLE
from shared.settings import child_environment


@contextmanager
def owner_of(mesh_id: str) -> Iterator[int]:
    """Yield the process id of one that runs until the block ends."""
    process = subprocess.Popen(["sleep", "60"], env=child_environment(**{MESH_VARIABLE: mesh_id}))
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
