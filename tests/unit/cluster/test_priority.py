"""A start is of low priority and leaves a process that serves at its station's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster import priority
from cluster.priority import (
    NICENESS_MAX,
    START_NICENESS,
    can_raise,
    is_scheduled_apart,
    own_niceness,
    quietly,
    start_command,
)

AS_A_REPLICA = """
import threading
from cluster.priority import own_niceness, quietly, serve_at
before, hold = own_niceness(), threading.Event()
other = threading.Thread(target=hold.wait)
other.start()
inside = quietly(own_niceness)
import os
started = os.sched_getscheduler(0)
serve_at({niceness}, {steps}, idle={idle})
print(before, inside, own_niceness(), os.getpriority(os.PRIO_PROCESS, other.native_id))
print(started, os.sched_getscheduler(0), os.sched_getscheduler(other.native_id))
hold.set()
"""


def test_only_the_work_is_of_low_priority() -> None:
    before = own_niceness()
    low = before if before >= START_NICENESS else min(before + START_NICENESS, NICENESS_MAX)
    assert quietly(own_niceness) == low
    assert own_niceness() == before


def test_arguments_and_results_pass_through() -> None:
    assert quietly(divmod, 7, 2) == (3, 1)


def test_a_failure_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        quietly(divmod, 7, 0)


def test_asking_whether_a_priority_can_be_raised_leaves_it() -> None:
    before = own_niceness()
    assert can_raise() == _may_raise()
    assert own_niceness() == before


@pytest.mark.parametrize(("steps", "idle"), [(0, False), (3, False), (3, True)])
def test_a_process_started_low_serves_at_its_priority_in_all_its_threads(steps: int, idle: bool) -> None:
    if not _may_raise():
        pytest.skip("this process may not raise a priority")
    own, expected = own_niceness(), min(own_niceness() + steps, NICENESS_MAX)
    code = AS_A_REPLICA.format(niceness=own, steps=steps, idle=idle)
    command = f"exec {_command(may_raise=True, idle=True, yields=idle)} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    before, inside, after, other, *policies = map(int, done.stdout.split())
    assert before == inside == min(own + START_NICENESS, NICENESS_MAX)
    assert after == other == expected
    serves_in = os.SCHED_IDLE if idle else os.SCHED_OTHER
    assert policies == [os.SCHED_IDLE, serves_in, serves_in]


@pytest.mark.parametrize("idle", [False, True])
def test_a_process_that_may_not_raise_is_lowered_to_its_priority(idle: bool) -> None:
    own = own_niceness()
    code = AS_A_REPLICA.format(niceness=None, steps=2, idle=idle)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    before, _, after, other, *policies = map(int, done.stdout.split())
    assert (before, after, other) == (own, min(own + 2, NICENESS_MAX), min(own + 2, NICENESS_MAX))
    serves_in = os.SCHED_IDLE if idle else os.SCHED_OTHER
    assert policies == [os.SCHED_OTHER, serves_in, serves_in]


def test_what_may_not_raise_starts_low_only_where_it_stays_so() -> None:
    assert start_command(may_raise=False, idle=True, yields=False) == {}
    assert start_command(may_raise=False, idle=False, yields=True) == {}
    command = _command(may_raise=False, idle=True, yields=True)
    command += " -c 'import os; print(os.nice(0), os.sched_getscheduler(0))'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    assert list(map(int, done.stdout.split())) == [own_niceness(), os.SCHED_IDLE]


@pytest.mark.parametrize(
    ("groups", "by_session", "expected"),
    [
        ("0::/\n", "1\n", True),
        ("9:name=systemd:/x\n4:memory:/y\n2:cpu,cpuacct:/\n0::/\n", "1\n", True),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "1\n", False),
        ("2:cpu,cpuacct:/user.slice\n0::/\n", "1\n", False),
        ("0::/\n", "0\n", False),
        ("0::/\n", None, False),
        ("9:name=systemd:/\n", "1\n", False),
    ],
)
def test_a_mesh_is_apart_where_cores_go_to_its_session_or_container(
    groups: str, by_session: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(priority, "AUTOGROUP", tmp_path / "autogroup")
    (tmp_path / "cgroup").write_text(groups, encoding="utf-8")
    if by_session is not None:
        (tmp_path / "autogroup").write_text(by_session, encoding="ascii")
    assert is_scheduled_apart() is expected


@pytest.mark.parametrize("idle", [False, True])
def test_the_command_runs_this_interpreter(idle: bool) -> None:
    command = _command(may_raise=True, idle=idle, yields=idle) + " -c 'import sys; print(sys.executable)'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == sys.executable


def _command(*, may_raise: bool, idle: bool, yields: bool) -> str:
    return start_command(may_raise=may_raise, idle=idle, yields=yields)["py_executable"]


def _may_raise() -> bool:
    """Ask in the other way: what a thread of its own is told by the system."""
    told: list[bool] = []

    def ask() -> None:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, before + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, before)
            told.append(True)
        except PermissionError:
            told.append(False)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return told[0]
