"""Follows the deltas of a version: reads new ones from the store and applies them, in order, for as long as it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import Field

from shared.clock import Clock
from shared.config import Config
from shared.errors import RankMeshError
from shared.weights.delta_log import DeltaLog
from shared.weights.deltas import Delta
from shared.weights.errors import NEEDS_SNAPSHOT


class FollowConfig(Config):
    """How deltas are followed.

    Args:
        period_s: Time between looks at the store.
        deltas_max: Deltas that are applied in one look; more come with the next.
    """

    period_s: float = Field(1.0, gt=0, le=3600)
    deltas_max: int = Field(64, ge=1, le=10_000)


class Follower(Protocol):
    """Weights that deltas are applied to; ``models.updates.LiveWeights`` is one."""

    def apply(self, delta: Delta) -> Any:
        """Take the next step; on failure the old state stays."""
        ...


@dataclass(frozen=True, slots=True)
class FollowStatus:
    """How following goes.

    Args:
        sequence: Last delta that was applied.
        newest: Newest delta that was seen in the store.
        reason: What went wrong at the last look; empty when nothing did.
        needs_snapshot: The series cannot be followed any further: a full version is needed.
        looks: Looks at the store.
    """

    sequence: int
    newest: int = 0
    reason: str = ""
    needs_snapshot: bool = False
    looks: int = 0


class DeltaFollower:
    """Applies what is new in a log.

    Args:
        log: The deltas.
        target: What they are applied to.
        config: Period and limit.
        clock: Time between looks.
        sequence: Delta that the target has already.
    """

    def __init__(self, log: DeltaLog, target: Follower, config: FollowConfig, clock: Clock, sequence: int = 0) -> None:
        self._log = log
        self._target = target
        self._config = config
        self._clock = clock
        self._status = FollowStatus(sequence)

    @property
    def status(self) -> FollowStatus:
        """How it goes."""
        return self._status

    async def run(self) -> None:
        """Look, apply, wait, until it is cancelled or a full version is needed.

        What goes wrong is in the status and tried again; a gap or a fork is not: no later delta would mend it.
        """
        while True:
            await self.look()
            if self._status.needs_snapshot:
                return
            await self._clock.sleep_s(self._config.period_s)

    async def look(self) -> int:
        """Apply what is new now; return how many deltas that was."""
        # On a thread: reading blocks, and applying copies rows; the event loop answers requests meanwhile.
        return await asyncio.to_thread(self._look)

    def _look(self) -> int:
        applied = 0
        reason, needs_snapshot = "", False
        try:
            sequences = self._log.sequences()
            newest = sequences[-1] if sequences else 0
            self._status = replace(self._status, newest=newest, looks=self._status.looks + 1)
            for delta in self._log.since(self._status.sequence, self._config.deltas_max):
                self._target.apply(delta)
                self._status = replace(self._status, sequence=delta.sequence)
                applied += 1
        except RankMeshError as error:
            reason, needs_snapshot = error.message, isinstance(error, NEEDS_SNAPSHOT)
        self._status = replace(self._status, reason=reason, needs_snapshot=needs_snapshot)
        return applied
