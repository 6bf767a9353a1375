"""Which calls go to the replica that knows their user: sequence keeps encoded histories, each in one replica's memory.

Serve's own consistent hashing does it (``cluster.routers``): every router hashes a call's key onto the replicas' names,
so all of them choose alike; when that replica has no room, does not answer or is gone the next one on the ring is
asked, which encodes the history anew.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig

from cluster.handles import KeyOf
from shared.hashing import EntityId, canonical_id
from shared.schema.user import EncodeTask

_ROUTERS = "cluster.routers."


def user_key(call: EncodeTask | EntityId) -> str:
    """Return the key of one user's encodes, and of the call that forgets what they left."""
    return str(canonical_id(call.user if isinstance(call, EncodeTask) else call))


KEYS: dict[str, dict[str, KeyOf]] = {"sequence": {"encode": user_key, "forget": user_key}}
"""Station -> method -> key of a call."""


def router_of(station: str, num_replicas: int) -> RequestRouterConfig:
    """Return how calls of a station choose their replica: by key, or the less busy of two; of those that answer."""
    options: dict[str, Any] = {"request_router_class": f"{_ROUTERS}TwoChoicesRouter"}
    if station in KEYS and num_replicas > 1:
        options = {
            "request_router_class": f"{_ROUTERS}KeyedRouter",
            "request_router_kwargs": {"num_fallback_replicas": num_replicas},
        }
    return RequestRouterConfig(**options)


def keys_of(station: str, num_replicas: int) -> dict[str, KeyOf]:
    """Return the keys of a station's calls: none where there is nothing to choose."""
    return KEYS.get(station, {}) if num_replicas > 1 else {}
