"""What an explored request was answered, kept until its outcome is known (ingress -> sequence -> trainer).

An explored request is served by the best tier whatever it is worth (``services.ingress.routing``). The tiers are exits
of one network, so that one answer holds what every tier would have said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt

from shared.hashing import EntityId

_FORMAT = 1
_KINDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "user": (int, str),
    "version": str,
    "surface": str,
    "as_of_s": int,
    "answered_s": int,
    "depths": list,
    "items": bytes,
    "exits": bytes,
    "signals": bytes,
}


@dataclass(frozen=True, slots=True)
class ExploredAnswer:
    """One answer with all exits; C candidates, D depths, O objectives, K signals.

    Args:
        user: Canonical user id.
        version: Stamp of the weights.
        surface: Surface name.
        as_of_s: Request time, seconds since the epoch: what the user does from then on is an outcome.
        answered_s: When it was answered by the clock of the mesh, seconds since the epoch.
        depths: D depths, ascending, 0 the first pass.
        item_keys: int64 [C], id keys of the candidates.
        exits: float32 [C, D, O], logits as the network said them, before calibration.
        signals: float32 [K], request-only signals that the router would have seen.
    """

    user: EntityId
    version: str
    surface: str
    as_of_s: int
    answered_s: int
    depths: tuple[int, ...]
    item_keys: npt.NDArray[np.int64]
    exits: npt.NDArray[np.float32]
    signals: npt.NDArray[np.float32]

    def encode(self) -> bytes:
        """Return it as msgpack."""
        document: dict[str, Any] = {
            "format": _FORMAT,
            "user": self.user,
            "version": self.version,
            "surface": self.surface,
            "as_of_s": self.as_of_s,
            "answered_s": self.answered_s,
            "depths": list(self.depths),
            "items": self.item_keys.astype("<i8").tobytes(),
            "exits": self.exits.astype("<f4").tobytes(),
            "signals": self.signals.astype("<f4").tobytes(),
        }
        packed: bytes = msgpack.packb(document, unicode_errors="surrogatepass")
        return packed

    @classmethod
    def decode(cls, data: bytes, num_objectives: int) -> Self:
        """Read one.

        Args:
            data: What ``encode`` gave.
            num_objectives: O.

        Raises:
            ValueError: it is something else, or holds a number that is not finite.
        """
        try:
            found = msgpack.unpackb(data, unicode_errors="surrogatepass")
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"an explored answer must be msgpack: {error}") from error
        if not isinstance(found, dict) or set(found) != set(_KINDS) or found["format"] != _FORMAT:
            raise ValueError(f"an explored answer must be a map of format {_FORMAT}")
        for name, kind in _KINDS.items():
            if not isinstance(found[name], kind):
                raise ValueError(f"{name} of an explored answer is a {type(found[name]).__name__}")
        depths = tuple(found["depths"])
        items = np.frombuffer(found["items"], "<i8").astype(np.int64)
        exits, signals = (np.frombuffer(found[name], "<f4").astype(np.float32) for name in ("exits", "signals"))
        if exits.size != len(items) * len(depths) * num_objectives:
            raise ValueError(f"an explored answer has {exits.size} logits for {len(items)} items, {len(depths)} depths")
        if not (np.isfinite(exits).all() and np.isfinite(signals).all()):
            raise ValueError("the numbers of an explored answer must be finite")
        return cls(
            user=found["user"],
            version=found["version"],
            surface=found["surface"],
            as_of_s=found["as_of_s"],
            answered_s=found["answered_s"],
            depths=depths,
            item_keys=items,
            exits=exits.reshape(len(items), len(depths), num_objectives),
            signals=signals,
        )
