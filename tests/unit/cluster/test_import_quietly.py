"""Imports at the lowest priority leave the process as it was."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from cluster.stations import import_quietly


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = "import os, threading\nPRIORITY = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    (tmp_path / "imported_quietly.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "imported_quietly", raising=False)
    return "imported_quietly"


def test_only_the_import_is_of_low_priority(module: str) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    import_quietly(module)
    assert sys.modules[module].PRIORITY == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
