"""One real mesh for all chaos tests, traffic with known answers, and a summary of what the faults did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.chaos.traffic import WarmTraffic
from benchmarks.chaos.world import hosted_world, world_config
from benchmarks.client import MeshClient
from benchmarks.site import Site
from cluster.config import MeshConfig
from cluster.local import Mesh
from shared.clock import SystemClock

CLIENT_TIMEOUT_S = 10.0
"""An answer that takes longer has hung: ten times the budget of the requests."""

_LINES: list[str] = []


@pytest.fixture(scope="session")
def world_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="session")
def deployment(world_dir: Path) -> MeshConfig:
    return world_config(world_dir, "chaos")


@pytest.fixture(scope="session")
def hosted(world_dir: Path, deployment: MeshConfig) -> Iterator[tuple[Mesh, Site]]:
    with hosted_world(world_dir, deployment) as parts:
        yield parts


@pytest.fixture(scope="session")
def warmed() -> dict[str, WarmTraffic]:
    """Hold the traffic of the session: its cases are warmed once, its client is a new one in each test's loop."""
    return {}


@pytest_asyncio.fixture
async def traffic(hosted: tuple[Mesh, Site], warmed: dict[str, WarmTraffic]) -> AsyncIterator[WarmTraffic]:
    clock = SystemClock()
    async with MeshClient(hosted[1].url, CLIENT_TIMEOUT_S, 64, clock) as client:
        if "traffic" not in warmed:
            warmed["traffic"] = WarmTraffic(hosted[1], client, clock)
            await warmed["traffic"].warm()
        warmed["traffic"].client = client
        yield warmed["traffic"]


@pytest.fixture
def report() -> list[str]:
    """Return where a test writes one line for the summary."""
    return _LINES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each fault did."""
    if _LINES:
        terminalreporter.section("faults")
        for line in _LINES:
            terminalreporter.write_line(line)
