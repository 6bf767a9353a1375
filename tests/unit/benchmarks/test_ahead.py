"""A client that shares its cores with the mesh is put ahead of it, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ahead
from benchmarks.ahead import NICENESS_MIN, ahead_of_the_mesh
from cluster.priority import own_niceness


@pytest.mark.parametrize("before", ["0", "-5", "7"])
def test_its_session_is_ahead_meanwhile(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tmp_path / "autogroup"
    session.write_text(f"/autogroup-12 nice {before}\n", encoding="ascii")
    monkeypatch.setattr(ahead, "AUTOGROUP", session)
    with ahead_of_the_mesh():
        assert session.read_text(encoding="ascii") == str(NICENESS_MIN)
    assert session.read_text(encoding="ascii") == before


def test_a_kernel_without_sessions_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AUTOGROUP", tmp_path / "autogroup")
    before = own_niceness()
    with ahead_of_the_mesh():
        assert own_niceness() <= before
    assert own_niceness() == before
    assert not (tmp_path / "autogroup").exists()
