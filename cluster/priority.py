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

A step of niceness is a share of a core, not a turn: what wakes still waits for the end of the running one's slice. So
where a mesh's processes are scheduled among themselves only (``is_scheduled_apart``), its stations that compute are in
the kernel's idle class, which whatever else wakes in the mesh interrupts at once; between themselves, and with what
starts, they are equals there.
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

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
CGROUP = Path("/proc/self/cgroup")

_LOWER = "import os, sys; os.nice({niceness}); {idle}os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
_IDLE = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "


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


def is_scheduled_apart() -> bool:
    """Return whether the kernel gives cores to this process's session or container first, and then within it.

    Then nobody else's program is among those that an idle class waits for. A process in another control group than the
    topmost that it sees shares that one with whatever else was started there, for instance all of a terminal's.
    """
    try:
        groups = [line.split(":", 2) for line in CGROUP.read_text(encoding="utf-8").splitlines()]
        is_by_session = AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    except OSError:  # another system, or a kernel without them
        return False
    cpu = [path for _, controllers, path in groups if not controllers or "cpu" in controllers.split(",")]
    return is_by_session and bool(cpu) and set(cpu) == {"/"}


def start_command(*, may_raise: bool, idle: bool, yields: bool) -> dict[str, str]:
    """Return the runtime environment of a replica whose process is to start at a low priority; empty: at the mesh's.

    Args:
        may_raise: Whether the process may take that back.
        idle: Whether the mesh makes use of the kernel's idle class.
        yields: Whether the replica stays in it.
    """
    is_idle = idle and (may_raise or yields)
    if not may_raise and not is_idle:
        return {}
    code = _LOWER.format(niceness=START_NICENESS if may_raise else 0, idle=_IDLE if is_idle else "")
    return {"py_executable": f"{shlex.quote(sys.executable)} -ISc {shlex.quote(code)}"}


def serve_at(mesh_niceness: int | None, steps: int, *, idle: bool) -> None:
    """Give every thread of this process the priority of a replica that serves, but those that are lower than the rest.

    Args:
        mesh_niceness: Of the process which started the mesh; None: this process was started at that.
        steps: How much lower this station's is.
        idle: Whether it is in the kernel's idle class.

    Raises:
        PermissionError: that is a higher one than it has, and it may not.
    """
    now = os.getpriority(os.PRIO_PROCESS, os.getpid())
    niceness = min((now if mesh_niceness is None else mesh_niceness) + steps, NICENESS_MAX)
    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
    for thread in THREADS.iterdir():
        try:
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
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
