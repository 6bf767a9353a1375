"""Want of memory for one process: a control group with a limit, and something in it that uses the limit up.

What a process held before it came into the group is not counted there, so the limit says how much it may still take.
The rest of the machine notices nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.processes import Process, started_ticks, wait_until
from shared.clock import SystemClock
from shared.errors import ConfigError, StageUnavailableError

ROOT: Final = Path("/sys/fs/cgroup/memory")
PREFIX: Final = "rmchaos-"

_MINE: Final = re.compile(rf"^{PREFIX}(\d+)-(\d+)$")
_KILLED_S: Final = 5.0
_EMPTY_S: Final = 5.0

# Takes page after page until it is ended; the system must end the other one first, so it asks to be spared.
_HOG: Final = """
import mmap, os, sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1], "w").write(str(os.getpid()))
held = []
for _ in range(int(sys.argv[2])):
    held.append(mmap.mmap(-1, 2**20)); held[-1].write(bytes(2**20))
time.sleep(600)
"""


@dataclass(slots=True)
class MemoryCell:
    """One control group.

    Args:
        limit_bytes: What those in it may take together.
    """

    limit_bytes: int
    _folder: Path = field(default_factory=Path)
    _hog: subprocess.Popen[bytes] | None = None

    def press(self, pid: int) -> None:
        """Shut a process in, and use up the limit beside it.

        Raises:
            StageUnavailableError: this machine does not allow it, or the process is gone.
        """
        self._folder = own_group() / f"{PREFIX}{os.getpid()}-{started_ticks(os.getpid())}"
        try:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
            (self._folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            self.release()
            raise StageUnavailableError(f"no control group for process {pid}: {error}", stage="memory") from error
        mebibytes = self.limit_bytes // 2**20
        command = [sys.executable, "-S", "-c", _HOG, str(self._folder / "cgroup.procs"), str(mebibytes)]
        self._hog = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        victim = Process(pid, started_ticks(pid) or 0)
        wait_until(lambda: not victim.is_alive(), SystemClock(), _KILLED_S)

    def release(self) -> int:
        """Remove the group; returns how many processes in it the system has ended."""
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()
        killed = _num_killed(self._folder)
        empty(self._folder)
        return killed


def own_group() -> Path:
    """Return the memory control group of this process."""
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    path = next((line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory"), None)
    if path is None:
        raise ConfigError(
            "want of memory needs control groups of version 1 with the memory controller", field="kind", value="memory"
        )
    return ROOT / path.lstrip("/")


def check_allowed() -> None:
    """Check that this process may have control groups, and remove those of runs that are gone.

    Raises:
        ConfigError: names what is missing.
    """
    group = own_group()
    if not os.access(group, os.W_OK):
        raise ConfigError(f"want of memory needs a right to write {group}", field="kind", value="memory")
    for folder in group.glob(f"{PREFIX}*"):
        found = _MINE.match(folder.name)
        if found is not None and started_ticks(int(found[1])) != int(found[2]):
            empty(folder)


def empty(folder: Path) -> None:
    """Move what is in a group to where it came from, end its hog, and remove it."""
    if not folder.name.startswith(PREFIX) or not folder.is_dir():
        return
    for pid in map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if _HOG.encode() in words:
            os.kill(pid, signal.SIGKILL)
        else:
            (folder.parent / "cgroup.procs").write_text(str(pid))
    wait_until(lambda: _is_removed(folder), SystemClock(), _EMPTY_S)


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # the last one is still ending
        return not folder.exists()
    return True


def _num_killed(folder: Path) -> int:
    try:
        control = (folder / "memory.oom_control").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in control.splitlines() if line.startswith("oom_kill ")), 0)
