"""Encoded histories of users, kept between requests: a bounded map, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from models.history import EncodedHistory
from shared.hashing import EntityId, canonical_id

StateKey: TypeAlias = tuple[str, EntityId, str]
"""Weights version, user, surface: what a state must agree in before its events are compared at all."""


@dataclass(frozen=True, slots=True)
class _Kept:
    history: EncodedHistory
    num_bytes: int


class StateCache:
    """States by weights version, user and surface; not safe for several threads, the replica's one worker owns it.

    Whether a state fits a request's events is the state's to say (``EncodedHistory.covers``): a version or a history
    that is no longer asked for is not looked for, it leaves when its room is needed.

    Args:
        bytes_max: Bytes of states that are kept; 0 keeps none.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._states: OrderedDict[StateKey, _Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of states held."""
        return len(self._states)

    def find(self, version: str, user: EntityId, surface: str) -> EncodedHistory | None:
        """Return what is kept of a user."""
        key = (version, canonical_id(user), surface)
        found = self._states.get(key)
        if found is None:
            return None
        self._states.move_to_end(key)
        return found.history

    def keep(self, version: str, user: EntityId, surface: str, history: EncodedHistory) -> None:
        """Keep a state in place of an earlier one of the same key; one larger than all the room is not kept."""
        key = (version, canonical_id(user), surface)
        self._drop(key)
        num_bytes = history.num_bytes
        if num_bytes > self._bytes_max:
            return
        self._states[key] = _Kept(history, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._bytes_max:
            self._drop(next(iter(self._states)))

    def forget(self, user: EntityId) -> None:
        """Drop everything of a user."""
        user = canonical_id(user)
        for key in [key for key in self._states if key[1] == user]:
            self._drop(key)

    def _drop(self, key: StateKey) -> None:
        if (old := self._states.pop(key, None)) is not None:
            self.num_bytes -= old.num_bytes
