"""Sequence: the user log, and everything about a request that does not depend on a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Self

from models.golden import Golden
from models.source import WeightSource
from models.stations import EncodedRequest, RequestEncoder
from services.meter import Meter, Timer
from services.sequence.config import SequenceConfig
from services.sequence.histories import HistoryCache
from services.sequence.states import StateCache
from services.sequence.visits import Visit, Visits
from services.worker import Worker, WorkerLoad
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import DamagedLogError, DeadlineExceededError, StoreUnavailableError
from shared.hashing import EntityId
from shared.log import JsonLogger
from shared.schema.api import Event
from shared.schema.explored import ExploredAnswer
from shared.schema.stamp import Stamp
from shared.schema.user import EncodeTask, UserHistory, UserState
from shared.userlog import BufferedUserLog, UserLog
from shared.userlog.explored import ExploredLog, MemoryExploredLog
from shared.weights.held import OneVersion, Versions

STATION = "sequence"

STORE_UNAVAILABLE = "store_unavailable"
"""``UserState.degraded`` of a user about whom nothing could be learned."""

STALE_HISTORY = "stale_history"
"""``UserState.degraded`` of a state made from the last history that this replica had read."""

FORGET_MS_MAX = 10_000
"""Longest wait for the encodes that a deletion comes behind, milliseconds."""


class SequenceService:
    """One replica of sequence.

    Args:
        config: Configuration.
        versions: The request-only path by weights version.
        log: The user log.
        clock: Time.
        replica: Name of this replica.
        logger: Where failed calls are logged.
        executor: Runs the network; None: a thread of its own.
        explored: Keeps explored answers; None: the memory of this process does.
    """

    def __init__(
        self,
        config: SequenceConfig,
        versions: Versions[RequestEncoder],
        log: UserLog,
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
        executor: Executor | None = None,
        explored: ExploredLog | None = None,
    ) -> None:
        self.meter = Meter(STATION, replica, clock, logger)
        self.explored = explored or MemoryExploredLog()
        self._config = config
        self._versions = versions
        self._log = BufferedUserLog(log, config.buffer, clock, self._lost)
        self._clock = clock
        self._replica = replica
        self._worker = Worker(STATION, config.queue_max, executor=executor, clock=clock)
        self._histories = HistoryCache(config.cached_users_max)
        self._states = StateCache(config.cached_state_bytes)
        self._visits = Visits()

    @classmethod
    def from_weights(
        cls,
        config: SequenceConfig,
        source: WeightSource,
        log: UserLog,
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
    ) -> Self:
        """Build a replica from a weights version.

        Raises:
            WeightsError: the weights do not answer their golden request.
        """
        encoder = RequestEncoder.from_weights(source)
        Golden.from_weights(source).check_encoder(encoder)
        return cls(config, OneVersion(source.version, encoder), log, clock, replica, logger)

    async def encode(self, task: EncodeTask) -> UserState:
        """Encode one user at one time.

        A store that is out of reach is no error: the last history that this replica read stands in, or none.

        Raises:
            VersionMismatchError: another weights version is asked for.
            DeadlineExceededError: the request expired while it waited.
            OverloadedError: too many requests wait here.
        """
        with self.meter.call("encode", task.request_id) as timer:
            deadline = Deadline.after_ms(task.remaining_ms, self._clock)
            deadline.check(STATION)
            encoder = await self._versions.get(task.version, STATION)
            with self._visits.of(task.user) as visit:
                history, degraded = await self._read(task, encoder.history_length, deadline, visit)
                self.meter.metrics.observe("store_read_ms", timer.elapsed_ms())
                made, compute_ms = await self._worker.run(deadline, self._encode, encoder, history, task, visit)
            self.meter.computed("encode", compute_ms)
            self.meter.add("history_events_total", made.num_encoded, origin="encoded")
            self.meter.add("history_events_total", made.num_reused, origin="reused")
            self.meter.metrics.set("cached_state_bytes", self._states.num_bytes)
            return UserState(
                stamp=Stamp(task.request_id, task.version, STATION, self._replica, compute_ms),
                tensors=made.tensors,
                history_length=min(len(history), encoder.history_length),
                last_event_s=int(history.timestamps_s[-1]) if len(history) else 0,
                as_of_s=task.as_of_s,
                degraded=degraded,
            )

    async def append(self, events: Sequence[Event]) -> dict[str, int]:
        """Append events to users' logs; while the store is out of reach they are buffered to a bound.

        Returns:
            The fields of ``EventsResponse``.

        Raises:
            DamagedLogError: some users' logs are damaged; the events of all others are written.
            StoreUnavailableError: neither store nor buffer took them; none is kept.
        """
        with self.meter.call("append"):
            result = await self._log.append(events)
            counts = {what: getattr(result, what) for what in ("appended", "duplicates", "expired", "buffered")}
            for what, count in counts.items():
                self.meter.add("events_total", count, fate=what)
            self.meter.metrics.set("buffered_events", self._log.num_buffered)
            return counts

    async def forget(self, user: EntityId) -> bool:
        """Delete a user's events, profile and explored answers, those that wait in this replica included.

        Raises:
            StoreUnavailableError: the store is out of reach; nothing is deleted then.
            OverloadedError: too many requests wait here; the log has forgotten the user then, this replica has not yet.
        """
        with self.meter.call("forget"):
            found = await self._log.delete(user)
            self._visits.forget(user)
            self._histories.forget(user)
            # On the worker's thread, which owns the states, and behind what it encodes for this user now.
            await self._worker.run(Deadline.after_ms(FORGET_MS_MAX, self._clock), self._states.forget, user)
            return await self.explored.forget(user) or found

    async def keep_explored(self, answer: ExploredAnswer) -> bool:
        """Keep an explored answer until its outcome is known.

        Raises:
            StoreUnavailableError: the store is out of reach.
        """
        with self.meter.call("keep_explored"), self._visits.of(answer.user) as visit:
            await self.explored.add(answer)
            if visit.is_forgotten:
                await self.explored.forget(answer.user)
            return True

    def load(self) -> WorkerLoad:
        """Return how busy the compute thread is."""
        return self._worker.load()

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        return self.meter.metrics.render()

    def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        held = {
            "queued": self._worker.num_held,
            "cached_users": len(self._histories),
            "cached_states": len(self._states),
            "cached_state_bytes": self._states.num_bytes,
            "buffered_events": self._log.num_buffered,
        }
        counters = {**self.meter.counters(), **held}
        return {
            "station": STATION,
            "replica": self._replica,
            **self._versions.report().body(),
            "counters": counters,
            "execution": str(self._versions.newest().execution),
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check; a store that is out of reach degrades answers, it does not end replicas."""

    async def aclose(self) -> None:
        """Try once more to write what is buffered, and stop."""
        self._worker.close()
        try:
            await self._log.aclose()
        except StoreUnavailableError as error:
            self.meter.add("events_total", self._log.num_buffered, fate="lost")
            self.meter.logger.error("events_lost", error=error, num_lost=self._log.num_buffered)

    def _lost(self, error: DamagedLogError) -> None:
        num_lost = int(error.context["num_events"] or 0)
        self.meter.add("events_total", num_lost, fate="lost")
        self.meter.logger.error("events_lost", error=error, num_lost=num_lost)

    def _encode(
        self, encoder: RequestEncoder, history: UserHistory, task: EncodeTask, visit: Visit
    ) -> tuple[EncodedRequest, float]:
        """Encode on the worker's thread, one request at a time: the second of two for one user finds the first's."""
        timer = Timer(self._clock)
        key = task.version, task.user, task.surface
        made = encoder.encode_from(self._states.find(*key), history, task.user, task.surface, task.as_of_s)
        if not visit.is_forgotten:  # one that is forgotten from here on is dropped behind this work
            self._states.keep(*key, made.history)
        return made, timer.elapsed_ms()

    async def _read(self, task: EncodeTask, length: int, deadline: Deadline, visit: Visit) -> tuple[UserHistory, str]:
        """Return the history to encode, and why it is not the full one."""
        limit_ms = min(self._config.store_timeout_ms, deadline.to_wire_ms())
        try:
            reading = self._log.read(task.user, task.as_of_s, length)
            history = await Deadline.after_ms(limit_ms, self._clock).run(reading, "user log")
        except (StoreUnavailableError, DeadlineExceededError):
            known = self._histories.last_known(task.user, task.as_of_s)
            reason = STORE_UNAVAILABLE if known is None else STALE_HISTORY
            self.meter.add("degraded_total", reason=reason)
            return known or UserHistory.empty(), reason
        if not visit.is_forgotten:
            self._histories.keep(task.user, history)
        return history, ""
