"""Import rule 6, which an import linter cannot see: who may touch environment, clock and shared randomness."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.repository import PACKAGES, names_used, names_used_in, python_files

# What may only be used in the files named beside it.
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
CLOCKS = (
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.sleep",
    "asyncio.sleep",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
)
STOPWATCH = ("time.perf_counter", "time.perf_counter_ns")
READS_ENVIRONMENT = ("shared/settings.py", "kernels/backends.py")
"""kernels imports nothing of ours: it asks for TRITON_INTERPRET, which is Triton's own, and for RANKMESH_NATIVE."""

# Drawing from a process-wide generator; a generator of one's own (Random(seed), default_rng(seed)) is the way.
SHARED_RANDOMNESS = (
    "random.choice",
    "random.choices",
    "random.randint",
    "random.random",
    "random.sample",
    "random.seed",
    "random.shuffle",
    "random.uniform",
    "numpy.random.choice",
    "numpy.random.normal",
    "numpy.random.permutation",
    "numpy.random.rand",
    "numpy.random.randint",
    "numpy.random.randn",
    "numpy.random.random",
    "numpy.random.seed",
    "numpy.random.shuffle",
    "numpy.random.uniform",
)


def uses(name: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{name}:{line} {used}"
        for line, used in names_used_in(name)
        if any(used == item or used.startswith(f"{item}.") for item in forbidden)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_environment_variables_only_in_settings(package: str) -> None:
    found = [use for name in python_files(package) if name not in READS_ENVIRONMENT for use in uses(name, ENVIRONMENT)]
    assert not found, "read the environment through shared.settings"


@pytest.mark.parametrize("package", PACKAGES)
def test_clock_and_sleep_only_in_the_clock(package: str) -> None:
    forbidden = tuple(c for c in CLOCKS if c not in STOPWATCH) if package in ("benchmarks", "kernels") else CLOCKS
    found = [use for name in python_files(package) if name != "shared/clock.py" for use in uses(name, forbidden)]
    assert not found, "take a shared.clock.Clock (benchmarks and kernels may time with perf_counter)"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_draw_from_a_process_wide_generator(package: str) -> None:
    found = [use for name in python_files(package) for use in uses(name, SHARED_RANDOMNESS)]
    assert not found, "draw from a generator made from an explicit seed"


def test_unit_tests_do_not_sleep() -> None:
    found = [use for name in python_files("tests/unit", "tests/simulation") for use in uses(name, ("time.sleep",))]
    assert not found, "use a ManualClock"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.sleep(1)", (2, "time.sleep")),
        ("import time as t\n\nt.sleep(1)", (3, "time.sleep")),
        ("from time import sleep as s", (1, "time.sleep")),
        ("import os\nos.environ.get('A')", (2, "os.environ.get")),
        ("import os.path\nos.environ['A']", (2, "os.environ")),
        ("import numpy as np\nnp.random.seed(0)", (2, "numpy.random.seed")),
        ("async def f():\n    import asyncio\n    await asyncio.sleep(1)", (3, "asyncio.sleep")),
    ],
)
def test_every_way_to_reach_a_name_is_seen(source: str, expected: tuple[int, str]) -> None:
    assert expected in names_used(ast.walk(ast.parse(source)))


def test_a_name_that_was_not_imported_is_not_taken_for_the_module() -> None:
    assert names_used(ast.walk(ast.parse("def f(time):\n    return time.sleep(1)"))) == []
