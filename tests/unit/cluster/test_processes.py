"""Processes of a mesh are found by its id and ended, and no others."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from cluster.processes import MESH_VARIABLE, Process, end_members, members, started_ticks, wait_until
from shared.clock import SystemClock
from shared.settings import child_environment

Start = Callable[..., subprocess.Popen[bytes]]
SLEEP = ("sleep", "60")
STUBBORN = (sys.executable, "-S", "-c", "import signal,time;signal.signal(15,1);print(1,flush=True);time.sleep(60)")


@pytest.fixture
def mesh_id() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def run(mesh_id: str, *command: str) -> subprocess.Popen[bytes]:
        env = child_environment(**{MESH_VARIABLE: mesh_id})
        children.append(subprocess.Popen(command or SLEEP, env=env, stdout=subprocess.PIPE))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate()


def test_members_carry_the_id(start: Start, mesh_id: str) -> None:
    ours, other = start(mesh_id), start(secrets.token_hex(8))
    found = [process.pid for process in members(mesh_id)]
    assert found == [ours.pid]
    assert other.pid not in found
    assert members(mesh_id, besides=[ours.pid]) == []


def test_an_id_that_begins_like_another_is_another(start: Start, mesh_id: str) -> None:
    start(mesh_id + "0")
    assert members(mesh_id) == []


def test_children_of_children_are_members(start: Start, mesh_id: str) -> None:
    parent = start(mesh_id, "sh", "-c", "sleep 60 & echo $!; wait")
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert {process.pid for process in members(mesh_id)} == {parent.pid, child}
    assert end_members(mesh_id, SystemClock(), grace_s=2.0) == []
    assert started_ticks(child) is None


def test_ending_spares_others(start: Start, mesh_id: str) -> None:
    ours, spared, other = start(mesh_id), start(mesh_id), start(secrets.token_hex(8))
    assert end_members(mesh_id, SystemClock(), 2.0, besides=[spared.pid]) == []
    assert ours.wait(1) == -signal.SIGTERM
    assert spared.poll() is None
    assert other.poll() is None


def test_who_does_not_listen_is_killed(start: Start, mesh_id: str) -> None:
    child = start(mesh_id, *STUBBORN)
    assert child.stdout is not None
    child.stdout.readline()  # it ignores the signal from here on
    assert end_members(mesh_id, SystemClock(), grace_s=0.1) == []
    assert child.wait(1) == -signal.SIGKILL


def test_a_process_that_ended_unnoticed_is_not_alive(start: Start, mesh_id: str) -> None:
    child = start(mesh_id, "true")
    clock = SystemClock()
    assert wait_until(lambda: started_ticks(child.pid) is None, clock, 1.0)  # not waited for: a zombie
    assert members(mesh_id) == []


def test_another_process_with_the_same_number_is_not_it(start: Start, mesh_id: str) -> None:
    child = start(mesh_id)
    ticks = started_ticks(child.pid)
    assert ticks is not None
    assert Process(child.pid, ticks).is_alive()
    earlier = Process(child.pid, ticks - 1)
    assert not earlier.is_alive()
    earlier.send(signal.SIGKILL)
    assert child.poll() is None


def test_this_process_is_never_a_member() -> None:
    assert os.getpid() not in {process.pid for process in members("")}


def test_waiting_ends_at_its_limit() -> None:
    clock = FakeClock()
    assert not wait_until(lambda: False, clock, timeout_s=1.0)
    assert clock.time_s == pytest.approx(1.0, abs=0.1)
    assert wait_until(lambda: True, clock, timeout_s=0)


class FakeClock:
    """Moves only when somebody blocks on it."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def monotonic_s(self) -> float:
        return self.time_s

    def block_s(self, duration_s: float) -> None:
        self.time_s += duration_s
