"""Who owns a simulated mesh: the production loop of roll-outs, what it is asked for, and its way to the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.canary import CanaryConfig
from cluster.desk import RolloutRequest
from cluster.rollout import UpdatesConfig
from cluster.simulation.network import Network, Replica, Station
from cluster.simulation.world import FIRST, SECOND, World
from services.ingress.service import IngressService
from services.ingress.serving import ServingOrder
from shared.errors import RankMeshError, StageUnavailableError, WeightsError

UPDATES = UpdatesConfig(
    period_s=0.1,
    confirm_s=1.0,
    busy_share=0.5,
    spread_s_max=0.2,
    hold_timeout_s=0.2,
    load_timeout_s=3.0,
    canary=CanaryConfig(answers_min=6, failed_share_max=0.3),
)
MARGIN_S = 0.1
"""What a reply may take beyond the time that a replica was given."""

LATE: Mapping[str, Any] = {"error": "it did not answer in time"}


@dataclass(frozen=True, slots=True)
class Taken:
    """An order that an ingress replica has taken.

    Args:
        at_s: When.
        ingress: Which.
        order: What it ranks with from then on.
    """

    at_s: float
    ingress: int
    order: ServingOrder


class SimulatedDesk:
    """``cluster.rollout.Desk`` of a world: its deltas, its second version, and what it asks for.

    Args:
        world: The world.
        now_s: Tells simulated seconds.
    """

    def __init__(self, world: World, now_s: Callable[[], float]) -> None:
        self._deltas_s = world.deltas_s
        self._now_s = now_s
        self._asks: list[tuple[float, RolloutRequest]] = []
        if (rollout := world.rollout) is not None:
            request = RolloutRequest(
                id="out", action="rollout", version=SECOND, share=rollout.share, watch_s=rollout.watch_s
            )
            self._asks.append((rollout.at_s, request))
            if rollout.back_at_s is not None:
                self._asks.append((rollout.back_at_s, RolloutRequest(id="back", action="rollback")))

    def latest(self) -> str:
        """Return the second version."""
        return SECOND

    def check(self, version: str) -> None:
        """Refuse what is neither version."""
        if version not in (FIRST, SECOND):
            raise WeightsError(f"there is no version {version}", value=version)

    def newest_delta(self, version: str) -> int:
        """Return how many deltas of the first version have come; the second has none."""
        return sum(at_s <= self._now_s() for at_s in self._deltas_s) if version == FIRST else 0

    def is_asked(self) -> bool:
        """Return whether it is time for the next request."""
        return bool(self._asks) and self._asks[0][0] <= self._now_s()

    def take(self) -> bytes | None:
        """Return the next request once it is time."""
        return self._asks.pop(0)[1].model_dump_json().encode() if self.is_asked() else None


class SimulatedControl:
    """``cluster.rollout.MeshControl`` over the replicas of a simulated mesh.

    Args:
        stations: By name.
        ingresses: The ingress replicas.
        network: The way to them.
        deaf_share: Share of orders to the ingress of which nothing is heard; half of them arrive.

    Attributes:
        order: What a replica that starts finds.
        taken: The orders that ingress replicas took.
    """

    def __init__(
        self,
        stations: Mapping[str, Station],
        ingresses: Sequence[IngressService],
        network: Network,
        deaf_share: float,
    ) -> None:
        self._stations = stations
        self._ingresses = ingresses
        self._network = network
        self._deaf_share = deaf_share
        self._late: set[asyncio.Task[Any]] = set()
        self.order = ServingOrder.first(FIRST)
        self.taken: list[Taken] = []

    def stations(self) -> Sequence[str]:
        """Return all stations, the ingress first."""
        return ["ingress", *self._stations]

    async def hold(self, station: str, stamps: Sequence[str], wait_s: float) -> Sequence[Mapping[str, Any]]:
        """Tell every replica of a station which states to hold."""
        if station == "ingress":
            return await asyncio.gather(*(self._get_to_know(ingress, stamps) for ingress in self._ingresses))
        replicas = self._stations[station].replicas
        return await asyncio.gather(*(self._hold(station, replica, stamps, wait_s) for replica in replicas))

    async def serve(self, order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        """Tell every ingress replica what to rank with."""
        return await asyncio.gather(*(self._order(number, order) for number in range(len(self._ingresses))))

    def publish(self, order: ServingOrder) -> None:
        """Let who starts now find it."""
        self.order = order

    async def _get_to_know(self, ingress: IngressService, stamps: Sequence[str]) -> Mapping[str, Any]:
        await self._network.travel()
        said = await ingress.serving.hold(stamps)
        await self._network.travel()
        return said

    async def _hold(self, station: str, replica: Replica, stamps: Sequence[str], wait_s: float) -> Mapping[str, Any]:
        telling = self._network.loop.create_task(self._tell(station, replica, stamps, wait_s), name="hold")
        self._late.add(telling)
        telling.add_done_callback(self._late.discard)
        await asyncio.wait([telling], timeout=wait_s + MARGIN_S)
        if not telling.done():  # it is on its way, and arrives when the replica wakes
            return LATE
        error = telling.exception()
        if isinstance(error, RankMeshError):
            return {"error": error.message}
        return telling.result()

    async def _tell(self, station: str, replica: Replica, stamps: Sequence[str], wait_s: float) -> Mapping[str, Any]:
        network = self._network
        await network.travel(station)
        awake = network.loop.create_future()
        replica.receive(lambda: awake.set_result(None))
        await awake
        report = await replica.service.versions.hold(stamps, wait_s)
        await network.travel(station)
        if not replica.is_alive:
            raise StageUnavailableError(f"{replica.name} is gone", stage=station)
        body: Mapping[str, Any] = report.body()
        return body

    async def _order(self, number: int, order: ServingOrder) -> Mapping[str, Any]:
        network, ingress = self._network, self._ingresses[number]
        await network.travel()
        fate = network.rng.random()
        if fate < self._deaf_share / 2:
            return LATE
        try:
            said = await ingress.serving.take(order)
        except RankMeshError as error:
            return {"error": error.message}
        self.taken.append(Taken(network.loop.time(), number, order))
        await network.travel()
        return LATE if fate < self._deaf_share else {**said, "feedback": ingress.feedback.sums()}
