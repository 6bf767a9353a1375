"""Serve's routers of calls, with circuit breakers: a replica that has fallen silent is left out (``shared.breaker``).

Serve makes one router a deployment in every process that has a handle of it. Those of the ingress get the breakers from
``cluster.handles``; without, as in other processes, these choose as Serve's own do. Read in the source of Ray 2.60:

* Which replica a call went to is known to ``_choose_replica_for_request`` only, which runs in a task that the call
  makes: so the call's ``Trip`` is found by context. Serve's own ids do not tell the calls of one HTTP request apart.
* This module is pickled by value into every process that makes a router: it can hold no context variable itself.
* ``on_request_routed`` comes when a replica has accepted a call, which a silent one never does.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from shared.breaker import Breakers, Trip


class _WithBreakers(RequestRouter):
    """What both routers have; whoever makes calls sets ``breakers``."""

    breakers: Breakers | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._keep()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        trip = Trip.current()
        if trip is None or trip.only is None:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        else:
            replica = self._named(trip, is_retry)
        if trip is not None:
            trip.sent_to(replica.replica_id.unique_id)
        return replica

    def _named(self, trip: Trip, is_retry: bool) -> RunningReplica:
        found = [replica for known, replica in self.curr_replicas.items() if known.unique_id == trip.only]
        if is_retry:
            trip.answered()  # it has no room, and says so
        if is_retry or not found:
            raise ReplicaUnavailableError(f"{trip.only} takes no call")
        return found[0]

    def _usable(self, replica_ids: Iterable[ReplicaID]) -> list[ReplicaID]:
        by_name = {replica_id.unique_id: replica_id for replica_id in replica_ids}
        names = list(by_name)
        return [by_name[name] for name in (names if self.breakers is None else self.breakers.usable(names))]

    def _keep(self) -> None:
        if self.breakers is not None:
            self.breakers.keep({replica_id.unique_id for replica_id in self.curr_replicas})


class TwoChoicesRouter(_WithBreakers, PowerOfTwoChoicesRequestRouter):
    """Serve's default: the less busy of two drawn replicas, of those that answer."""

    def apply_locality_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """Return the replicas that may be drawn."""
        return set(self._usable(super().apply_locality_routing(pending_request)))


class KeyedRouter(_WithBreakers, ConsistentHashRouter):
    """The replica that a call's key hashes to, while it answers; else the next one on the ring."""

    def _lookup_ranked_replicas(self, routing_key: str) -> list[ReplicaID]:
        return self._usable(super()._lookup_ranked_replicas(routing_key))
