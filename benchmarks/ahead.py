"""The priority of a client that shares its cores with the mesh."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.priority import can_raise, own_niceness, set_niceness

CLIENT_AHEAD = 5
"""By how much the niceness of the client is lower than the mesh's."""

NICENESS_MIN = -20


AUTOGROUP = Path("/proc/self/autogroup")


def own_session() -> None:
    """Make this process the leader of a session that is ahead of all others, where it may be.

    Between sessions Linux counts the session's niceness, not the thread's (``sched_autogroup_enabled``). One of equal
    rank waited 7 to 9 ms on two busy cores each time that it had something to do, a few times a request.
    """
    os.setsid()
    with suppress(OSError):  # no right to, or no sessions' shares in this kernel
        AUTOGROUP.write_text(str(NICENESS_MIN), encoding="ascii")


@contextmanager
def ahead_of_the_mesh() -> Iterator[None]:
    """Give this thread a higher priority than the mesh has, where it may: clients are on other machines.

    On two busy cores a client of the mesh's own priority was up to 6 s late while replicas started.
    """
    before = own_niceness()
    raised = can_raise()
    if raised:
        set_niceness(max(before - CLIENT_AHEAD, NICENESS_MIN))
    try:
        yield
    finally:
        if raised:
            set_niceness(before)
