"""A real control group: the system ends the process in it for want of memory, and nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from benchmarks.chaos.memory import PREFIX, MemoryCell, check_allowed, own_group
from shared.errors import ConfigError

HOLD = "import time; held = bytearray(200 * 2**20); print('holds', flush=True); time.sleep(60)"


def test_what_is_shut_in_without_memory_is_ended_and_what_is_outside_is_not() -> None:
    try:
        check_allowed()
    except ConfigError as refusal:
        pytest.skip(refusal.message)
    processes = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    victim, other = processes
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
        cell = MemoryCell(64 * 2**20)
        cell.press(victim.pid)
        assert victim.wait(10) == -signal.SIGKILL
        assert cell.release() > 0
        assert other.poll() is None
        assert list(own_group().glob(f"{PREFIX}*")) == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()
