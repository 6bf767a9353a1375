"""Speaks to all replicas of a mesh at once, and keeps what a replica that starts must know in Ray's own key store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve.handle import DeploymentHandle

from cluster.config import MeshConfig
from cluster.failures import as_rankmesh_error
from cluster.handles import has_lost_all_replicas
from cluster.names import APP, deployment_name, station_configs
from services.ingress.serving import ServingOrder

_KEY = b"serving-order"
_MARGIN_S = 5.0
"""What a reply may take beyond the time that a replica was given: starved cores, transport."""


class ServeControl:
    """``cluster.rollout.MeshControl`` over Ray Serve; all calls from one event loop.

    Args:
        config: The mesh.
    """

    def __init__(self, config: MeshConfig) -> None:
        self._config = config
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    def stations(self) -> Sequence[str]:
        """Return the stations that hold weights.

        One that has scaled to zero is left out: whoever starts there finds in the published order what to hold.
        """
        stations = station_configs(self._config)
        return [name for name, part in stations.items() if part.replicas_min > 0 or self._has_replicas(name)]

    async def hold(self, station: str, stamps: Sequence[str], wait_s: float) -> Sequence[Mapping[str, Any]]:
        """Tell every replica of a station which states to hold; returns what each says."""
        return await self._broadcast(station, wait_s, "hold", list(stamps), wait_s)

    async def serve(self, order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        """Tell every ingress replica what to rank with; returns what each says."""
        return await self._broadcast("ingress", 0.0, "serve", order.model_dump(mode="json"))

    def publish(self, order: ServingOrder) -> None:
        """Put the order where a replica that starts finds it."""
        internal_kv._internal_kv_put(_KEY, order.model_dump_json().encode(), namespace=self._config.name.encode())

    async def _broadcast(self, station: str, wait_s: float, method: str, *args: object) -> list[dict[str, Any]]:
        """Call a method of every running replica; one that fails, or does not answer, gives its error."""
        try:
            response = self._handle(station).broadcast(method, *args)
            replies = await response.results_async(timeout_s=wait_s + _MARGIN_S, return_exceptions=True)
        except (ray.exceptions.RayError, serve.exceptions.RayServeException, TimeoutError) as error:
            return [{"error": as_rankmesh_error(error, station).message}]
        return [
            reply if isinstance(reply, dict) else {"error": as_rankmesh_error(reply, station).message}
            for reply in replies
        ]

    def _has_replicas(self, station: str) -> bool:
        """Return whether a station has any replica, as far as this process has heard."""
        return not has_lost_all_replicas(self._handle(station))

    def _handle(self, station: str) -> DeploymentHandle[Any]:
        if station not in self._handles:
            handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment_name(station), APP)
            self._handles[station] = handle.options(_by_reference=False)
        return self._handles[station]


def published_order(mesh: str) -> ServingOrder | None:
    """Return the last order of a mesh, None before the first; for a replica that starts."""
    found: bytes | None = internal_kv._internal_kv_get(_KEY, namespace=mesh.encode())
    return None if found is None else ServingOrder.model_validate_json(found)
