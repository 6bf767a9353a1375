"""The guardian ends a mesh when the owner's end of its input closes, however that comes about."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys

import pytest

from cluster.guardian import main
from cluster.processes import MESH_VARIABLE, started_ticks
from shared.settings import child_environment


def test_the_mesh_ends_with_its_owner() -> None:
    mesh_id = secrets.token_hex(8)
    env = child_environment(**{MESH_VARIABLE: mesh_id})
    guardian = subprocess.Popen(
        [sys.executable, "-S", "-m", "cluster.guardian", mesh_id], stdin=subprocess.PIPE, env=env
    )
    member = subprocess.Popen(["sleep", "60"], env=env)
    assert guardian.stdin is not None
    assert started_ticks(member.pid) is not None
    guardian.stdin.close()
    assert guardian.wait(20) == 0
    assert member.wait(1) == -signal.SIGTERM


def test_it_takes_one_id() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        main([])
