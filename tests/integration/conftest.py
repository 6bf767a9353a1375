"""One real mesh for all integration tests: the default deployment on a small world of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.chaos.world import hosted_world, world_config
from benchmarks.site import Site
from cluster.local import Mesh


@pytest.fixture(scope="session")
def world_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="session")
def hosted(world_dir: Path) -> Iterator[tuple[Mesh, Site]]:
    with hosted_world(world_dir, world_config(world_dir, "integration")) as parts:
        yield parts


@pytest.fixture(scope="session")
def site(hosted: tuple[Mesh, Site]) -> Site:
    return hosted[1]


@pytest.fixture(scope="session")
def mesh(hosted: tuple[Mesh, Site]) -> Mesh:
    return hosted[0]


@pytest.fixture(scope="session")
def http(site: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=site.url, timeout=30.0, trust_env=False) as client:
        yield client
