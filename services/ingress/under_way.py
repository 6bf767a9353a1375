"""Which requests are under way, so that one that may have read what is deleted meanwhile leaves nothing of its user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.ingress.flow import Flow
from shared.hashing import EntityId


class UnderWay:
    """The requests of one ingress replica by user; as many as admission lets in."""

    def __init__(self) -> None:
        self._of_user: dict[EntityId, set[Flow]] = {}
        self._leaving: Counter[EntityId] = Counter()

    @contextmanager
    def of(self, flow: Flow) -> Iterator[None]:
        """Note a request for as long as the context lasts."""
        user = flow.job.user
        flow.is_forgotten = user in self._leaving
        flows = self._of_user.setdefault(user, set())
        flows.add(flow)
        try:
            yield
        finally:
            flows.discard(flow)
            if not flows:
                self._of_user.pop(user, None)

    @contextmanager
    def forgetting(self, user: EntityId) -> Iterator[None]:
        """Tell the requests of a user that are under way, and those that come before the context has ended."""
        self._leaving[user] += 1
        for flow in self._of_user.get(user, ()):
            flow.is_forgotten = True
        try:
            yield
        finally:
            self._leaving[user] -= 1
            if not self._leaving[user]:
                del self._leaving[user]

    def __len__(self) -> int:
        """Number of users with a request under way."""
        return len(self._of_user)
