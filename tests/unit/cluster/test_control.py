"""Orders to all replicas: what a station without any says."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from ray.serve.exceptions import RayServeException

from cluster.config import MeshConfig
from cluster.control import ServeControl
from cluster.names import station_configs
from tests.helpers.waiting import until
from tests.unit.cluster.fake_serve import FakeServeHandle


class Replies:
    def __init__(self, replies: list[dict[str, Any]]) -> None:
        self._replies = replies

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[dict[str, Any]]:
        return self._replies


class Broadcasting(FakeServeHandle):
    """A handle whose replicas all hold what they are told to; without any it raises, as Serve does."""

    def broadcast(self, method: str, *args: Any) -> Replies:
        if not self.replicas:
            raise RayServeException("unavailable")
        return Replies([{"held": args[0]} for _ in self.replicas])


def control(scaling: dict[str, Any] | None, num_workers: int) -> ServeControl:
    replicas = {"replicas": 1, "autoscaling": scaling}
    config = MeshConfig.model_validate({"foundation": {"replicas": replicas}})
    control = ServeControl(config)
    for name in station_configs(config):
        control._handles[name] = cast(Any, Broadcasting(num_workers if name == "foundation" else 1))
    return control


async def test_a_station_that_scaled_to_none_holds_nothing_up() -> None:
    said = await control({"min_replicas": 0}, 0).hold(["v2"], 1.0)
    assert "foundation" not in said
    assert said["sequence"] == [{"held": ["v2"]}]
    assert (await control({"min_replicas": 0}, 2).hold(["v2"], 1.0))["foundation"] == [{"held": ["v2"]}] * 2


async def test_a_station_that_lost_its_replicas_does() -> None:
    for scaling in (None, {"min_replicas": 1}):
        assert "error" in (await control(scaling, 0).hold(["v2"], 1.0))["foundation"][0]


class Slow:
    """Replies that come when they are let."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[dict[str, Any]]:
        await self._gate.wait()
        return [{"held": ["v2"]}]


class Told:
    """A handle that notes when it is told something."""

    def __init__(self, name: str, told: list[str], gate: asyncio.Event) -> None:
        self._name, self._told, self._gate = name, told, gate

    def broadcast(self, method: str, *args: Any) -> Slow:
        self._told.append(self._name)
        return Slow(self._gate)


async def test_stations_are_told_one_after_the_other() -> None:
    config = MeshConfig()
    control, told = ServeControl(config), list[str]()
    gates = {name: asyncio.Event() for name in station_configs(config)}
    for name, gate in gates.items():
        control._handles[name] = cast(Any, Told(name, told, gate))
    holding = asyncio.create_task(control.hold(["v2"], 1.0))
    for number, gate in enumerate(gates.values(), 1):
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(told) == number
        gate.set()
    assert (await holding) == {name: [{"held": ["v2"]}] for name in gates}


async def test_a_station_that_does_not_answer_keeps_the_next_waiting_for_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.control._TURN_S", 0.001)
    config = MeshConfig()
    control, told, gate = ServeControl(config), list[str](), asyncio.Event()
    for name in station_configs(config):
        control._handles[name] = cast(Any, Told(name, told, gate))
    holding = asyncio.create_task(control.hold(["v2"], 1.0))
    await until(lambda: len(told) == len(station_configs(config)))
    gate.set()
    assert len(await holding) == len(told)
