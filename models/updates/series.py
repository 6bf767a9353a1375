"""One version and its deltas as parts that answer: ``shared.weights.held.Series`` over ``LiveWeights``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar

from models.updates.live import LiveState, LiveWeights
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta
from shared.weights.errors import DeltaGapError

PartT = TypeVar("PartT")

GOLDEN: Final = "golden"
"""Group of the answers that weights must give to the golden request."""

BATCH_BYTES_MAX: Final = 64 * 2**20
"""Deltas are applied together up to this many bytes."""


class LiveSeries(Generic[PartT]):
    """The states of a version that one station holds.

    Args:
        weights: What changes; builds what hangs on a state.
        log: The deltas of the version.
        bind: What answers with a state; may hold it.
    """

    def __init__(self, weights: LiveWeights, log: DeltaLog, bind: Callable[[LiveState], PartT]) -> None:
        self.weights = weights
        self._log = log
        self._bind = bind

    def advance(self, sequence: int) -> None:
        """Take up the state after a delta; the deltas up to it become one state, not one each.

        Except that the newest golden answers among them are those of a state of its own, which must give them. Older
        ones are of states that no request will ask for.

        Raises:
            DeltaError: a delta is missing, damaged, not the next one, or does not fit.
            WeightsError: the state does not give its golden answers.
            OverloadedError: so many old states are held that there is no room for another; may be tried again.
        """
        start = self.weights.state.sequence
        batch: list[Delta] = []
        num_bytes = 0
        for delta in self._log.since(start, limit=max(sequence - start, 0)):
            batch.append(delta)
            num_bytes += len(delta.payload)
            if num_bytes > BATCH_BYTES_MAX:
                self._take_up(batch)
                batch, num_bytes = [], 0
        self._take_up(batch)
        if (found := self.weights.state.sequence) != sequence:
            base = self._log.base
            raise DeltaGapError(
                f"delta {sequence} of {base} is asked for, the state is {found}: a full snapshot is needed",
                version=base,
                sequence=sequence,
                expected=sequence,
                found=found,
            )

    def _take_up(self, batch: list[Delta]) -> None:
        last = max((number for number, delta in enumerate(batch, 1) if brings_golden(delta)), default=0)
        for part in (batch[:last], batch[last:]):
            if part:
                self.weights.apply_all(part)

    def at(self, stamp: str) -> PartT:
        """Return the part of a held state.

        Raises:
            VersionMismatchError: it is not held.
        """
        return self._bind(self.weights.at(stamp))

    def stamps(self) -> tuple[str, ...]:
        """Return the held states, oldest first."""
        return self.weights.stamps()

    def keep(self, stamps: Collection[str]) -> None:
        """Let go of all states but these and the newest."""
        self.weights.keep(stamps)


def brings_golden(delta: Delta) -> bool:
    """Return whether a delta says what the weights answer after it."""
    return any(key.startswith(f"{GOLDEN}/") for key in delta.whole)
