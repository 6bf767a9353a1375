"""The last known history of users, for when the store is out of reach."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from shared.hashing import EntityId, canonical_id
from shared.schema.user import UserHistory


class HistoryCache:
    """A bounded map, least recently used out first.

    Args:
        users_max: Users that it holds; 0 keeps nothing.
    """

    def __init__(self, users_max: int) -> None:
        self._users_max = users_max
        self._histories: OrderedDict[EntityId, UserHistory] = OrderedDict()

    def __len__(self) -> int:
        """Number of users held."""
        return len(self._histories)

    def keep(self, user: EntityId, history: UserHistory) -> None:
        """Remember what the store just said about a user."""
        user = canonical_id(user)
        self._histories[user] = history
        self._histories.move_to_end(user)
        if len(self._histories) > self._users_max:
            self._histories.popitem(last=False)

    def forget(self, user: EntityId) -> None:
        """Drop what is remembered of a user."""
        self._histories.pop(canonical_id(user), None)

    def last_known(self, user: EntityId, before_s: int) -> UserHistory | None:
        """Return what is remembered of a user's events strictly before a time, None when nothing is.

        A history that was read for a later time is cut: a request never sees its own future, stale or not.
        """
        user = canonical_id(user)
        history = self._histories.get(user)
        if history is None:
            return None
        self._histories.move_to_end(user)
        num_earlier = int(np.searchsorted(history.timestamps_s, before_s, side="left"))
        num_later = len(history) - num_earlier
        if num_later == 0:
            return history
        return UserHistory(
            history.item_keys[:num_earlier],
            history.weights[:num_earlier],
            history.timestamps_s[:num_earlier],
            history.num_total - num_later,
            history.profile,
            None if history.sources is None else history.sources[:num_earlier],
        )
