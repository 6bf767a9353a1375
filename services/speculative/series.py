"""A part of a weights version of which a delta changes nothing but the name, as of the cache: it fences embeddings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from shared.errors import VersionMismatchError
from shared.weights.deltas import parse_stamp, version_stamp

PartT = TypeVar("PartT")


class NamedStates(Generic[PartT]):
    """The states of a version, each made of its name alone.

    Args:
        base: The version.
        make: From a stamp to the part, e.g. to the store of its embeddings.
    """

    def __init__(self, base: str, make: Callable[[str], PartT]) -> None:
        self._base = base
        self._make = make
        self._parts = {base: make(base)}

    def advance(self, sequence: int) -> None:
        """Take up the state after a delta; there is nothing to read for it.

        Raises:
            VersionMismatchError: it is before the newest, as with parts that are read.
        """
        newest = self.stamps()[-1]
        if sequence < parse_stamp(newest)[1]:
            raise VersionMismatchError(
                f"delta {sequence} of {self._base} is asked for, the state is {newest}",
                asked=str(sequence),
                held=newest,
            )
        stamp = version_stamp(self._base, sequence)
        self._parts = {**self._parts, stamp: self._make(stamp)}

    def at(self, stamp: str) -> PartT:
        """Return the part of a state.

        Raises:
            VersionMismatchError: it is not held.
        """
        if stamp not in self._parts:
            held = ", ".join(self._parts)
            raise VersionMismatchError(f"asked for {stamp}, held is {held}", asked=stamp, held=held)
        return self._parts[stamp]

    def stamps(self) -> tuple[str, ...]:
        """Return the held states, oldest first."""
        return tuple(self._parts)

    def keep(self, stamps: Collection[str]) -> None:
        """Let go of all states but these and the newest."""
        newest = self.stamps()[-1]
        self._parts = {stamp: part for stamp, part in self._parts.items() if stamp in stamps or stamp == newest}
