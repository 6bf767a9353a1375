"""Work at a low priority leaves the process as it was."""

from __future__ import annotations

import os
import threading

import pytest

from cluster.stations import NICENESS_MAX, START_NICENESS, quietly


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_work_is_of_low_priority() -> None:
    before = priority()
    assert quietly(priority) == min(before + START_NICENESS, NICENESS_MAX) > before
    assert priority() == before


def test_arguments_and_results_pass_through() -> None:
    assert quietly(divmod, 7, 2) == (3, 1)


def test_a_failure_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        quietly(divmod, 7, 0)
