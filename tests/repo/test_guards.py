"""The rules of tests/conftest.py hold: kernels are interpreted, unit tests start no cluster."""

from __future__ import annotations

import os

import pytest


def test_the_interpreter_switch_is_set_before_any_test_module_is_imported() -> None:
    assert "TRITON_INTERPRET" in os.environ


def test_a_unit_test_cannot_start_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # were the guard gone, this would fail to connect, not start one
    import ray

    with pytest.raises(AssertionError, match=r"unit test called ray\.init"):
        ray.init()
    with pytest.raises(AssertionError, match=r"unit test called ray\.init"):
        ray.put(1)  # starts a cluster by itself where none is
    assert not ray.is_initialized()
