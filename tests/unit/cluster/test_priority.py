"""A start is of low priority and leaves a process that serves at its station's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from cluster.priority import NICENESS_MAX, START_NICENESS, can_raise, own_niceness, quietly, start_command

AS_A_REPLICA = """
import threading
from cluster.priority import own_niceness, quietly, serve_at
before, hold = own_niceness(), threading.Event()
other = threading.Thread(target=hold.wait)
other.start()
inside = quietly(own_niceness)
serve_at({niceness}, {steps})
import os
print(before, inside, own_niceness(), os.getpriority(os.PRIO_PROCESS, other.native_id))
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


@pytest.mark.parametrize("steps", [0, 3])
def test_a_process_started_low_serves_at_its_priority_in_all_its_threads(steps: int) -> None:
    if not _may_raise():
        pytest.skip("this process may not raise a priority")
    own, expected = own_niceness(), min(own_niceness() + steps, NICENESS_MAX)
    code = AS_A_REPLICA.format(niceness=own, steps=steps)
    command = f"exec {start_command()['py_executable']} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    before, inside, after, other = map(int, done.stdout.split())
    assert before == inside == min(own + START_NICENESS, NICENESS_MAX)
    assert after == other == expected


def test_a_process_that_may_not_raise_is_lowered_to_its_priority() -> None:
    own = own_niceness()
    code = AS_A_REPLICA.format(niceness=None, steps=2)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    before, _, after, other = map(int, done.stdout.split())
    assert (before, after, other) == (own, min(own + 2, NICENESS_MAX), min(own + 2, NICENESS_MAX))


def test_the_command_runs_this_interpreter() -> None:
    command = start_command()["py_executable"] + " -c 'import sys; print(sys.executable)'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == sys.executable


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
