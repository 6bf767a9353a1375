"""Keeps what explored requests were answered, so that outcomes can be joined to it later.

One call to sequence after the answer is out, bounded in flight; what does not fit is dropped and counted. Only whole
answers of the chosen tier are kept: of a degraded one nobody could say what the tiers would have said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from services.ingress.config import ExplorationConfig
from services.ingress.flow import Flow
from services.ingress.leg import Leg, all_ended
from shared.clock import Clock
from shared.errors import StageSilentError
from shared.handle import Handle
from shared.hashing import EntityId, id_keys
from shared.schema.explored import ExploredAnswer
from shared.schema.ranking import RankedList


class Exploration:
    """Hands explored answers to sequence and keeps count of them.

    Args:
        sequence: Has the store.
        config: Bounds.
        clock: Time.
    """

    def __init__(self, sequence: Handle, config: ExplorationConfig, clock: Clock) -> None:
        self._sequence = sequence
        self._config = config
        self._clock = clock
        self._running: dict[asyncio.Task[None], EntityId] = {}
        self.num_kept = 0
        self.num_dropped = 0
        self.num_failed = 0

    def offer(self, flow: Flow, ranked: RankedList, ids: Sequence[EntityId], depths: tuple[int, ...]) -> bool:
        """Keep an answer if it was explored, is whole, and there is room.

        Args:
            flow: The request.
            ranked: Its answer.
            ids: Its candidates.
            depths: Depths of the model.

        Returns:
            Whether it is being kept.
        """
        if not flow.job.choice.explores or ranked.exits is None or ranked.signals is None or flow.is_forgotten:
            return False
        if not flow.inputs.whole or ranked.cold_start or ranked.history_degraded or ranked.missing_shards:
            return False
        if len(self._running) >= self._config.in_flight_max:
            self.num_dropped += 1
            return False
        judged = np.flatnonzero(np.isfinite(ranked.exits).all(axis=(1, 2)))[: self._config.candidates_max]
        if not len(judged):
            return False
        job = flow.job
        answer = ExploredAnswer(
            user=job.user,
            version=job.version,
            surface=job.surface,
            as_of_s=job.as_of_s,
            answered_s=int(self._clock.now_s()),
            depths=depths,
            item_keys=id_keys([ids[position] for position in ranked.order[judged].tolist()]),
            exits=ranked.exits[judged],
            signals=np.asarray(ranked.signals, np.float32),
        )
        task = asyncio.get_running_loop().create_task(self._keep(answer), name="exploration")
        self._running[task] = answer.user
        task.add_done_callback(self._running.pop)
        return True

    def forget(self, user: EntityId) -> None:
        """Keep nothing of a user that is on its way."""
        for task, of in self._running.items():
            if of == user:
                task.cancel()

    async def drain(self) -> None:
        """Wait until none runs."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()

    async def _keep(self, answer: ExploredAnswer) -> None:
        try:
            call = self._sequence.call("keep_explored", answer)
        except StageSilentError:  # nobody waits for it
            self.num_failed += 1
            return
        leg = Leg("sequence", call, self._clock, fetch=True)
        try:
            await all_ended([leg], self._clock.monotonic_s() + self._config.timeout_ms / 1e3, self._clock)
        finally:
            leg.cancel()
        if leg.value is None:
            self.num_failed += 1
        else:
            self.num_kept += 1
