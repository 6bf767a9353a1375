"""Options of the simulation: ``make sim SEED=n N=count``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=0, help="first seed of the simulation")
    parser.addoption("--sim-count", type=int, default=60, help="how many seeds to simulate")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--sim-seed"), metafunc.config.getoption("--sim-count")
        metafunc.parametrize("sim_seed", range(first, first + count))
