"""The request side: a user's history and the encoded user state (sequence -> ranking)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.hashing import EntityId
from shared.schema.stamp import Stamp


@dataclass(frozen=True, slots=True)
class UserHistory:
    """The newest L events of one user strictly before a time, oldest first.

    Args:
        item_keys: int64 [L], id keys of the items.
        weights: float32 [L], what the event was worth (here the rating, 0.5 to 5).
        timestamps_s: int64 [L], seconds since the epoch, non-decreasing.
        num_total: Events before that time, at least L: those too that a full log no longer shows, or windows over the
            newest events would move on with every event; 0 where it shows none.
        profile: Request-only attributes of the user, e.g. ``{"gender": "F", "age": "25"}``; empty when unknown.
        sources: uint8 [L], number of the source of each event in the log's configuration; None: all of the first.
    """

    item_keys: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    timestamps_s: npt.NDArray[np.int64]
    num_total: int
    profile: dict[str, str] = field(default_factory=dict)
    sources: npt.NDArray[np.uint8] | None = None

    @classmethod
    def empty(cls) -> UserHistory:
        """Return the history of a user about whom nothing is known."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64), 0)

    def __len__(self) -> int:
        """Number of events L."""
        return len(self.item_keys)


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """What sequence is asked: one user at one time.

    Args:
        request_id: The request.
        version: Weights version to encode with.
        user: Raw user id.
        surface: Surface name.
        as_of_s: Request time, seconds since the epoch; only events strictly before it are seen.
        remaining_ms: Budget left when the call was made.
    """

    request_id: str
    version: str
    user: EntityId
    surface: str
    as_of_s: int
    remaining_ms: float


@dataclass(frozen=True, slots=True)
class UserState:
    """The whole request-only path of the ranker, computed once a request.

    Args:
        stamp: Provenance.
        tensors: Name -> float32 array without a batch axis; the names and shapes are the model's (``models.ranker``).
        history_length: Events that were encoded.
        last_event_s: Time of the newest of them, 0 when there is none.
        as_of_s: Request time it was made for.
        degraded: Why it is not the full answer (``store_unavailable``, ``stale_history``), or empty.
    """

    stamp: Stamp
    tensors: dict[str, npt.NDArray[np.float32]]
    history_length: int
    last_event_s: int
    as_of_s: int
    degraded: str = ""
