"""How long the fuzzing is: ``make fuzz N=10000``; by default as short as a unit test."""

from __future__ import annotations

import pytest

EXAMPLES = 150


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, default=EXAMPLES, help="hostile inputs of each parser")


@pytest.fixture
def num_examples(request: pytest.FixtureRequest) -> int:
    """Return how many inputs each parser is given."""
    return int(request.config.getoption("--fuzz-examples"))
