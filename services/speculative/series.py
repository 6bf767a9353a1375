"""The cache's part of a weights version that follows its deltas: a name, which fences embeddings of other states."""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.speculative.store import EmbeddingStore
from shared.errors import VersionMismatchError
from shared.weights.deltas import version_stamp


class StoreSeries:
    """The states of a version whose embeddings are read and written.

    Args:
        base: The version.
        make: From a stamp to the store of its embeddings.
    """

    def __init__(self, base: str, make: Callable[[str], EmbeddingStore]) -> None:
        self._base = base
        self._make = make
        self._stores = {base: make(base)}

    def advance(self, sequence: int) -> None:
        """Take up the state after a delta; there is nothing to read for it."""
        stamp = version_stamp(self._base, sequence)
        self._stores = {**self._stores, stamp: self._make(stamp)}

    def at(self, stamp: str) -> EmbeddingStore:
        """Return the embeddings of a state.

        Raises:
            VersionMismatchError: it is not held.
        """
        if stamp not in self._stores:
            held = ", ".join(self._stores)
            raise VersionMismatchError(f"asked for {stamp}, held is {held}", asked=stamp, held=held)
        return self._stores[stamp]

    def stamps(self) -> tuple[str, ...]:
        """Return the held states, oldest first."""
        return tuple(self._stores)

    def keep(self, stamps: Collection[str]) -> None:
        """Let go of all states but these and the newest."""
        newest = self.stamps()[-1]
        self._stores = {stamp: store for stamp, store in self._stores.items() if stamp in stamps or stamp == newest}
