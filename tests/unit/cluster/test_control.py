"""Orders to all replicas: what a station without any says."""

from __future__ import annotations

from typing import Any, cast

from ray.serve.exceptions import RayServeException

from cluster.config import MeshConfig
from cluster.control import ServeControl
from cluster.names import station_configs
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


async def test_a_station_that_scaled_to_none_is_told_nothing() -> None:
    asleep, awake = control({"min_replicas": 0}, 0), control({"min_replicas": 0}, 2)
    assert set(awake.stations()) - set(asleep.stations()) == {"foundation"}
    assert await asleep.hold("sequence", ["v2"], 1.0) == [{"held": ["v2"]}]
    assert await awake.hold("foundation", ["v2"], 1.0) == [{"held": ["v2"]}] * 2


async def test_a_station_that_lost_its_replicas_is_and_says_so() -> None:
    for scaling in (None, {"min_replicas": 1}):
        lost = control(scaling, 0)
        assert "foundation" in lost.stations()
        assert "error" in (await lost.hold("foundation", ["v2"], 1.0))[0]
