"""Rules for every test: kernels are interpreted, and unit tests start no cluster.

Only pytest and the standard library are imported here, so that kernel tests also run where nothing else is installed.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# triton reads this when its own helpers are decorated, at its import: later is too late. A machine with a GPU sets 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

TESTS = Path(__file__).resolve().parent
FOLDER_MARKERS = ("integration", "chaos")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No deadline per example: shared two-core machines stall for longer than any useful limit.
    settings.register_profile("rankmesh", deadline=None, print_blob=True)
    settings.load_profile("rankmesh")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests the marker of their folder before -m selects, so a forgotten marker cannot start a cluster."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later collection of garbage: it is large, and stays to the end."""
    gc.collect()
    gc.freeze()


class _RayDoor(importlib.abc.MetaPathFinder):
    """Puts a door before ``ray.init`` at the moment ray is imported, which a test may do in its own body."""

    is_open = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ray where it is, with a loader that puts the door in."""
        if name != "ray":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_with_door(module: ModuleType) -> None:
                load(module)
                vars(module)["init"] = self.guard(module.init)

            vars(spec.loader)["exec_module"] = load_with_door
        return spec

    def guard(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``init`` behind the door; Ray's own calls (``ray.put`` and the like start a cluster) go through it."""

        @functools.wraps(init)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.is_open:
                raise AssertionError(
                    "a unit test called ray.init: test the plain class, or mark the test integration or chaos"
                )
            return init(*args, **kwargs)

        return guarded


_DOOR = _RayDoor()
sys.meta_path.insert(0, _DOOR)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Open the door for tests that are marked to start a cluster, before the first of their fixtures is built."""
    _DOOR.is_open = any(item.get_closest_marker(name) for name in FOLDER_MARKERS)
