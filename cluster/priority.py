"""Processor priority of a replica: low while it starts, its station's while it serves.

A start costs seconds of a core: the interpreter, Ray, torch, the weights, the golden request. On a machine whose cores
are busy that time would come out of the replicas that serve. Niceness is a property of a thread on Linux, new threads
inherit it, and only a privileged process may lower it again. So there are two ways:

- Where the mesh may (root, or ``CAP_SYS_NICE``), the process of a replica is started at ``START_NICENESS`` and raised
  when Serve first asks for its health (``serve_at``).
- Elsewhere a process starts at normal priority, and the heavy parts of its start have a thread of their own, which is
  low for ever and ends with them (``quietly``). Starting the interpreter and importing Ray is then not quiet.

Both count because replicas themselves run at normal priority (``RAY_worker_niceness``), or at most a few steps below:
the stations that compute yield to the ingress, which has only to decide, so that a refusal, a deadline or a second call
does not wait for a core (``cluster.config.NICENESS``). That is lowering, which every process may.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

START_NICENESS = 10
"""What a start adds: about a tenth of the share of a replica that serves, so that a start under overload still ends."""

NICENESS_MAX = 19

THREADS = Path("/proc/self/task")


def can_raise() -> bool:
    """Return whether a thread of this process may take back a lowered priority."""

    def probe() -> bool:
        before = own_niceness()
        set_niceness(before + 1)
        try:
            set_niceness(before)
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as thread:
        return own_niceness() < NICENESS_MAX and thread.submit(probe).result()


def start_command() -> dict[str, str]:
    """Return the runtime environment of a replica whose process is to start at a low priority."""
    return {"py_executable": f"nice -n {START_NICENESS} {shlex.quote(sys.executable)}"}


def serve_at(mesh_niceness: int | None, steps: int) -> None:
    """Give every thread of this process the priority of a replica that serves, but those that are lower than the rest.

    Args:
        mesh_niceness: Of the process which started the mesh; None: this process was started at that.
        steps: How much lower this station's is.

    Raises:
        PermissionError: that is a higher one than it has, and it may not.
    """
    now = os.getpriority(os.PRIO_PROCESS, os.getpid())
    niceness = min((now if mesh_niceness is None else mesh_niceness) + steps, NICENESS_MAX)
    for thread in THREADS.iterdir():
        try:
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) == now:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def quietly(work: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    """Run a part of a start at a low priority, in a thread of its own unless the whole process is at one already."""
    if own_niceness() >= START_NICENESS:
        return work(*args, **kwargs)
    with quiet_threads(1) as thread:
        return thread.submit(work, *args, **kwargs).result()


def quiet_threads(number: int) -> ThreadPoolExecutor:
    """Return threads that stay at a low priority, made before or after ``serve_at``."""

    def lower() -> None:
        before = own_niceness()
        set_niceness(min(before + (START_NICENESS if before < START_NICENESS else 1), NICENESS_MAX))

    return ThreadPoolExecutor(number, thread_name_prefix="quietly", initializer=lower)


def own_niceness() -> int:
    """Return the niceness of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def set_niceness(niceness: int) -> None:
    """Set the niceness of the calling thread.

    Raises:
        PermissionError: it is lower than it was, and the process has no right to that.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
