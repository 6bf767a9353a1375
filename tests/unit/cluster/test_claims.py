"""A name and a port are one mesh's at a time, and free again when who had them has ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cluster.claims import NameClaim, PortClaim
from shared.errors import ConfigError

PORT = 64_951


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "mesh" / "claim"
    first = NameClaim.take(path)
    assert first is not None
    assert NameClaim.take(path) is None
    first.release()
    again = NameClaim.take(path)
    assert again is not None
    again.release()
    again.release()


def test_a_name_stays_taken_while_a_child_that_got_it_lives(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    claim = NameClaim.take(path)
    assert claim is not None
    child = subprocess.Popen(["sleep", "60"], pass_fds=(claim.fileno(),))
    claim.release()
    try:
        assert NameClaim.take(path) is None
    finally:
        child.kill()
        child.wait()
    free = NameClaim.take(path)
    assert free is not None
    free.release()


def test_what_was_inherited_is_not_handed_on(tmp_path: Path) -> None:
    claim = NameClaim.take(tmp_path / "claim")
    assert claim is not None
    os.set_inheritable(claim.fileno(), True)
    assert not os.get_inheritable(NameClaim.inherited(claim.fileno()).fileno())
    claim.release()


def test_ports_are_taken_all_or_none() -> None:
    first, second, third = PortClaim(), PortClaim(), PortClaim()
    first.take([PORT, PORT + 1])
    with pytest.raises(ConfigError, match=f"port {PORT + 1} is taken by another mesh"):
        second.take([PORT + 2, PORT + 1])
    third.take([PORT + 2])
    third.release()
    first.release()
    second.take([PORT, PORT + 1, PORT + 2])
    second.release()


def test_ports_are_free_until_a_mesh_has_one() -> None:
    claim = PortClaim()
    claim.take([64_801])
    assert [PortClaim.is_free([64_800, 64_801]), PortClaim.is_free([64_800, 64_802])] == [False, True]
    claim.release()
    assert PortClaim.is_free([64_800, 64_801])
