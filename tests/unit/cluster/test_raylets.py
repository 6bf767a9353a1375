from __future__ import annotations

import io
from dataclasses import dataclass, field

import pytest

from cluster.config import MeshConfig, RayConfig
from cluster.raylets import Raylets
from shared.log import JsonLogger


@dataclass
class FakeNode:
    number: int
    dead: list[tuple[str, None]] = field(default_factory=list)
    killed: bool = False

    def dead_processes(self) -> list[tuple[str, None]]:
        return self.dead

    def kill_all_processes(self, *, check_alive: bool, allow_graceful: bool, wait: bool) -> None:
        assert not check_alive
        assert wait
        self.killed = True


@pytest.fixture
def started() -> list[FakeNode]:
    return []


@pytest.fixture
def raylets(started: list[FakeNode]) -> Raylets:
    def start(config: RayConfig, number: int) -> FakeNode:
        started.append(FakeNode(len(started)))
        return started[-1]

    raylets = Raylets(RayConfig(num_nodes=3), start)
    raylets.start()
    return raylets


def test_the_first_node_is_not_theirs(raylets: Raylets, started: list[FakeNode]) -> None:
    assert len(started) == 2


def test_a_node_whose_raylet_died_is_replaced_and_no_other(raylets: Raylets, started: list[FakeNode]) -> None:
    lines = io.StringIO()
    started[0].dead = [("dashboard_agent", None)]
    started[1].dead = [("raylet", None)]
    raylets.replace_dead(JsonLogger(stream=lines))
    assert [node.killed for node in started] == [False, True, False]
    assert "node_ended" in lines.getvalue()
    raylets.replace_dead(JsonLogger(stream=lines))
    assert len(started) == 3, "the new one lives"


def test_a_successor_that_does_not_start_is_tried_again() -> None:
    started, lines = list[FakeNode](), io.StringIO()

    def start(config: RayConfig, number: int) -> FakeNode:
        started.append(FakeNode(len(started)))
        if len(started) == 2:
            raise RuntimeError("the node timed out during startup")
        return started[-1]

    raylets = Raylets(RayConfig(num_nodes=2), start)
    raylets.start()
    started[0].dead = [("raylet", None)]
    raylets.replace_dead(JsonLogger(stream=lines))
    assert "the node timed out" in lines.getvalue()
    raylets.replace_dead(JsonLogger(stream=lines))
    raylets.replace_dead(JsonLogger(stream=lines))
    assert len(started) == 3
    raylets.stop()
    assert [node.killed for node in started] == [True, False, True]


def test_a_mesh_ends_whose_node_did_not_come_back(started: list[FakeNode]) -> None:
    def start(config: RayConfig, number: int) -> FakeNode:
        if started:
            raise RuntimeError("no more")
        started.append(FakeNode(0, dead=[("raylet", None)]))
        return started[0]

    raylets = Raylets(RayConfig(num_nodes=2), start)
    raylets.start()
    raylets.replace_dead(JsonLogger(stream=io.StringIO()))
    raylets.stop()


def test_all_end(raylets: Raylets, started: list[FakeNode]) -> None:
    raylets.stop()
    assert all(node.killed for node in started)


def test_nodes_of_other_addresses_are_not_behind_haproxy() -> None:
    apart = {"num_nodes": 2, "address": "10.0.0.1", "places": [PLACE]}
    with pytest.raises(ValueError, match=r"ray.places needs http.ingress proxy, is haproxy"):
        MeshConfig.model_validate({"ray": apart})
    MeshConfig.model_validate({"ray": apart, "http": {"ingress": "proxy"}})
    MeshConfig.model_validate({"ray": {"num_nodes": 2}})


PLACE = {"namespace": "trial-1", "address": "10.0.0.2"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_nodes": 3, "address": "10.0.0.1", "places": [PLACE]}, "places must be num_nodes - 1 = 2, are 1"),
        ({"num_nodes": 2, "places": [PLACE]}, "places need an address of the first node"),
        ({"num_nodes": 2, "address": "10.0.0.1", "places": [{**PLACE, "namespace": "../x"}]}, "namespace"),
        ({"num_nodes": 2, "address": "somewhere", "places": [PLACE]}, "address"),
    ],
)
def test_places_fit_the_nodes(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayConfig.model_validate(fields)
