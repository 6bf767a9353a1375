"""Which encodes are under way, so that one that has read what is deleted meanwhile keeps nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.hashing import EntityId, canonical_id


class Visit:
    """One encode under way.

    Attributes:
        is_forgotten: Whether its user was forgotten after it began.
    """

    __slots__ = ("is_forgotten",)

    def __init__(self) -> None:
        self.is_forgotten = False


class Visits:
    """The encodes under way by user; as many as the replica takes at once."""

    def __init__(self) -> None:
        self._of_user: dict[EntityId, list[Visit]] = {}

    @contextmanager
    def of(self, user: EntityId) -> Iterator[Visit]:
        """Note an encode of a user for as long as the context lasts."""
        user, visit = canonical_id(user), Visit()
        self._of_user.setdefault(user, []).append(visit)
        try:
            yield visit
        finally:
            rest = [other for other in self._of_user[user] if other is not visit]
            if rest:
                self._of_user[user] = rest
            else:
                del self._of_user[user]

    def forget(self, user: EntityId) -> None:
        """Tell all encodes of a user that are under way; in the moment in which the log has forgotten the user."""
        for visit in self._of_user.get(canonical_id(user), ()):
            visit.is_forgotten = True

    def __len__(self) -> int:
        """Number of users with an encode under way."""
        return len(self._of_user)
