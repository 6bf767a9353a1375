"""Which calls go to the replica that knows their user: sequence keeps encoded histories, each in one replica's memory.

Serve's own consistent hashing does it: every router hashes a call's key onto the replicas' names, so all of them choose
alike; when that replica has no room or is gone the next one on the ring is asked, which encodes the history anew.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig

from cluster.handles import KeyOf
from shared.hashing import EntityId, canonical_id
from shared.schema.user import EncodeTask

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def user_key(call: EncodeTask | EntityId) -> str:
    """Return the key of one user's encodes, and of the call that forgets what they left."""
    return str(canonical_id(call.user if isinstance(call, EncodeTask) else call))


KEYS: dict[str, dict[str, KeyOf]] = {"sequence": {"encode": user_key, "forget": user_key}}
"""Station -> method -> key of a call."""


def router_of(station: str, num_replicas: int) -> RequestRouterConfig | None:
    """Return how calls of a station choose their replica; None: Serve's default, the less busy of two."""
    if station not in KEYS or num_replicas < 2:
        return None
    options: dict[str, Any] = {
        "request_router_class": _ROUTER,
        "request_router_kwargs": {"num_fallback_replicas": num_replicas},
    }
    return RequestRouterConfig(**options)


def keys_of(station: str, num_replicas: int) -> dict[str, KeyOf]:
    """Return the keys of a station's calls: none where there is nothing to choose."""
    return KEYS.get(station, {}) if num_replicas > 1 else {}
