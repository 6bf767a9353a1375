"""Who is in the mesh: every deployment and replica, as Serve's controller and the replicas themselves tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import MeshConfig
from cluster.failures import start_failure
from cluster.names import APP, deployment_name, station_configs
from services.ingress.directory import DeploymentStatus, ReplicaState, ReplicaStatus, StoreStatus
from shared.clock import Clock
from shared.errors import StoreUnavailableError
from shared.log import redact_text
from shared.userlog import StoreConfig, connect
from shared.userlog.client import guard

CACHE_S = 1.0
"""Age up to which an answer is given again: asking costs every replica a call, about 20 ms of processor time in all."""

_CONTROLLER_TIMEOUT_S = 1.0
_REPLICA_TIMEOUT_S = 0.5
_STORE_TIMEOUT_MS = 200

_STATES: dict[str, ReplicaState] = {
    "RUNNING": "ready",
    "PENDING_MIGRATION": "ready",
    "STARTING": "starting",
    "UPDATING": "starting",
    "RECOVERING": "starting",
}
"""Serve's words for a replica that serves or will; with any other one it is on its way out."""

Replies: TypeAlias = dict[str, dict[str, Any]]
"""Replica name -> what it says of itself."""


class Informant(Protocol):
    """What the directory asks."""

    async def details(self) -> Mapping[str, Any] | None:
        """Return Serve's instance details, None when the controller does not answer."""
        ...

    async def replies(self) -> Replies:
        """Return the status of every replica that answers."""
        ...


class MeshDirectory:
    """Answers from memory while the last answer is young, and keeps it when the controller does not answer.

    Args:
        config: What should run.
        informant: Whom to ask.
        store: How to reach the store.
        clock: Ages of answers.
    """

    def __init__(self, config: MeshConfig, informant: Informant, store: StoreConfig, clock: Clock) -> None:
        self._config = config
        self._informant = informant
        self._store = store
        self._client: Any = connect(store)
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known = deployments_of({}, {}, config)
        self._known_s = float("-inf")

    async def deployments(self) -> list[DeploymentStatus]:
        """Return every deployment of the mesh, the ingress included."""
        async with self._lock:  # callers that come while one asks share its answer
            if self._clock.monotonic_s() - self._known_s > CACHE_S:
                details = await self._informant.details()
                if details is not None:
                    self._known = deployments_of(details, await self._informant.replies(), self._config)
                    self._known_s = self._clock.monotonic_s()
        return self._known

    async def store(self) -> StoreStatus:
        """Return the state of the store."""
        try:
            await guard(self._client.ping(), _STORE_TIMEOUT_MS, "ping")
            healthy = True
        except StoreUnavailableError:
            healthy = False
        return StoreStatus(kind=self._config.store.kind, url=redact_text(self._store.url), healthy=healthy)


class ServeInformant:
    """Asks Serve's controller and, by broadcast, the replicas.

    Args:
        handles: Station name -> its Serve handle, without the ingress.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = {name: handle.options(_by_reference=False) for name, handle in handles.items()}

    async def details(self) -> Mapping[str, Any] | None:
        """Return Serve's instance details, None when the controller does not answer: it may be restarting."""
        try:
            controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            async with asyncio.timeout(_CONTROLLER_TIMEOUT_S):
                details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            return None
        return details

    async def replies(self) -> Replies:
        """Return the status of every replica that answers."""
        if "ingress" not in self._handles:  # not there yet while the ingress itself is being built
            ingress: DeploymentHandle[Any] = serve.get_deployment_handle(deployment_name("ingress"), APP)
            self._handles["ingress"] = ingress.options(_by_reference=False)
        answers = await asyncio.gather(*(_broadcast(handle) for handle in self._handles.values()))
        return {status["replica"]: status for replies in answers for status in replies}


async def _broadcast(handle: DeploymentHandle[Any]) -> list[dict[str, Any]]:
    try:
        response = handle.broadcast("status")
        replies = await response.results_async(timeout_s=_REPLICA_TIMEOUT_S, return_exceptions=True)
    except (ray.exceptions.RayError, serve.exceptions.RayServeException, TimeoutError):
        return []  # no replica of it is alive; the controller's view says so
    return [reply for reply in replies if isinstance(reply, dict)]


def deployments_of(details: Mapping[str, Any], replies: Replies, config: MeshConfig) -> list[DeploymentStatus]:
    """Join the controller's view of the replicas with what they say of themselves.

    Args:
        details: Serve's instance details; empty when they are not known yet.
        replies: Replica name -> its status.
        config: What should run; a deployment that Serve does not know yet has no replicas.
    """
    deployed = details.get("applications", {}).get(APP, {}).get("deployments", {})
    result = []
    for station, wanted in station_configs(config).items():
        name = deployment_name(station)
        found = deployed.get(name, {})
        replicas = [_replica(name, each, replies) for each in found.get("replicas", []) if each["state"] in _STATES]
        target = found.get("target_num_replicas", wanted.replicas)
        lacks = sum(each.state == "ready" for each in replicas) < target
        reason = start_failure(found.get("message", "")) if lacks else ""
        result.append(
            DeploymentStatus(
                name=station, target=target, replicas=sorted(replicas, key=lambda each: each.id), reason=reason
            )
        )
    return result


def _replica(deployment: str, replica: Mapping[str, Any], replies: Replies) -> ReplicaStatus:
    name = f"{deployment}-{replica['replica_id']}"
    said = replies.get(name, {})
    return ReplicaStatus(
        id=name,
        state=_STATES[replica["state"]],
        pid=replica.get("pid"),
        version=said.get("version"),
        held=said.get("held", []),
        refused=said.get("refused", {}),
        loading=said.get("loading", []),
        counters=said.get("counters", {}),
        execution=said.get("execution"),
    )
