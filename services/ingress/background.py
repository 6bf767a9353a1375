"""Work after the answer: speculative embeddings of the pairs that the full pass has just scored.

The foundation worker reads the inputs that the request's own calls left behind; the ingress moves no tensor. Bounded
in flight; what does not fit is dropped and counted. Only whole answers are followed up: an embedding made from a
missing shard or a cold-start state would be served long after the fault is over.
"""

from __future__ import annotations

import asyncio

import numpy as np

from services.ingress.config import PrecomputeConfig
from services.ingress.flow import Flow
from services.ingress.job import Stations
from services.ingress.leg import Leg, all_ended
from services.ingress.serving import Serving
from shared.clock import Clock
from shared.errors import StageSilentError
from shared.hashing import EntityId
from shared.schema.ranking import RankedList
from shared.schema.speculative import HitLevel


class Precompute:
    """Starts precomputations and keeps count of them.

    Args:
        stations: Whom to call; without a foundation station nothing is ever started.
        config: Bounds.
        clock: Time.
        serving: Told which version is in use, and until when.
    """

    def __init__(self, stations: Stations, config: PrecomputeConfig, clock: Clock, serving: Serving) -> None:
        self._stations = stations
        self._config = config
        self._clock = clock
        self._serving = serving
        self._running: dict[asyncio.Task[None], tuple[str, EntityId]] = {}
        self.num_started = 0
        self.num_stored = 0
        self.num_dropped = 0
        self.num_failed = 0

    @property
    def in_flight(self) -> int:
        """Precomputations that run now."""
        return len(self._running)

    def offer(self, flow: Flow, ranked: RankedList) -> bool:
        """Follow up an answer if there is something to gain and room for it.

        Returns:
            Whether a precomputation was started; it runs once the caller's task yields.
        """
        if not (self._config.enabled and self._stations.foundation is not None and flow.job.speculative):
            return False
        if not flow.inputs.whole or ranked.cold_start or ranked.history_degraded or ranked.missing_shards:
            return False
        wanted = ranked.full_pass & (ranked.levels != HitLevel.EXACT)
        positions = ranked.order[wanted][: self._config.candidates_max].astype(np.int32)
        if len(positions) == 0:
            return False
        version, user = flow.job.version, flow.job.user
        # One a user at a time: many requests for what is not there yet must not compute it many times.
        if len(self._running) >= self._config.in_flight_max or (version, user) in self._running.values():
            self.num_dropped += 1
            return False
        self.num_started += 1
        self._serving.begin(version)
        task = asyncio.get_running_loop().create_task(self._run(flow, positions), name="precompute")
        self._running[task] = (version, user)
        task.add_done_callback(self._running.pop)
        task.add_done_callback(lambda _: self._serving.end(version))
        return True

    async def drain(self) -> None:
        """Wait until none runs."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Cancel what runs."""
        for task in self._running:
            task.cancel()

    async def _run(self, flow: Flow, positions: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        foundation = self._stations.foundation
        if foundation is None:
            return
        inputs = flow.inputs
        optional = (inputs.state, *inputs.rows)
        task = flow.job.speculative_task(self._config.timeout_ms)
        legs: list[Leg] = []
        try:
            call = foundation.call(
                "precompute",
                task,
                positions,
                inputs.features.call,
                *(None if leg is None else leg.call for leg in optional),
                payload_bytes=flow.job.whole_bytes,
            )
            legs.append(Leg("foundation", call, self._clock))
            pairs_bytes = len(positions) * flow.job.sizes.pair_bytes
            filled = self._stations.speculative.call("fill", task, call, payload_bytes=pairs_bytes)
            fill = Leg("speculative", filled, self._clock, fetch=True)
            legs.append(fill)
            await all_ended([fill], self._clock.monotonic_s() + self._config.timeout_ms / 1e3, self._clock)
            if fill.value is None:
                self.num_failed += 1
            else:
                self.num_stored += int(fill.value)
        except StageSilentError:  # nobody waits for it
            self.num_failed += 1
        finally:
            for leg in legs:
                leg.cancel()
