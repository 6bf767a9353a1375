"""The priority of a client that shares its cores with the mesh."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.priority import can_raise, own_niceness, set_niceness

CLIENT_AHEAD = 5
"""By how much the niceness of the client is lower than the mesh's."""

NICENESS_MIN = -20


AUTOGROUP = Path("/proc/self/autogroup")
"""Reads like ``/autogroup-12 nice 0``; takes a number."""


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
    """Give this thread, and its session, a higher priority than the mesh has, where it may: clients are elsewhere.

    On two busy cores a client of the mesh's own priority was up to 6 s late while replicas started, and one whose
    session was no more than the mesh's up to 12 s late while all those of a node did.
    """
    before = own_niceness()
    raised = can_raise()
    if raised:
        set_niceness(max(before - CLIENT_AHEAD, NICENESS_MIN))
    try:
        with _session_ahead():
            yield
    finally:
        if raised:
            set_niceness(before)


@contextmanager
def _session_ahead() -> Iterator[None]:
    """Put the session of this process ahead of all others, where it may, and back afterwards."""
    before: str | None = None
    with suppress(OSError):  # as in own_session
        if (told := re.search(r"nice (-?\d+)", AUTOGROUP.read_text(encoding="ascii"))) is not None:
            AUTOGROUP.write_text(str(NICENESS_MIN), encoding="ascii")
            before = told[1]
    try:
        yield
    finally:
        if before is not None:
            AUTOGROUP.write_text(before, encoding="ascii")
