"""Ends what is left of a mesh when the process that owns it is gone: ``python -m cluster.guardian MESH_ID``.

The owner holds the other end of standard input. However the owner ends, killed included, that end closes, and whatever
still carries the mesh's id is killed. Ray's node dies with its driver by itself, but its agents outlive it by minutes.
"""

from __future__ import annotations

import os
import signal
import sys

from cluster.processes import end_members
from shared.clock import SystemClock

GRACE_S = 2.0
"""Time for an orderly end of what the owner's death has already reached (the store writes its last events)."""


def main(arguments: list[str]) -> int:
    """Wait for the owner's end, then end the mesh.

    Args:
        arguments: The mesh id.

    Returns:
        0 when nothing is left, 1 when a process would not end.
    """
    (mesh_id,) = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the mesh has ended, not before
    while os.read(0, 4096):
        pass
    return 1 if end_members(mesh_id, SystemClock(), GRACE_S) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
