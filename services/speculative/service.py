"""Speculative: the cache of foundation embeddings, read for every request and filled after answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.meter import Meter
from services.speculative.config import SpeculativeConfig
from services.speculative.hierarchy import resolve
from services.speculative.store import EmbeddingStore
from services.stamps import check_stamps
from shared.clock import Clock
from shared.deadline import Deadline
from shared.errors import DeadlineExceededError, InvalidRequestError, StoreUnavailableError
from shared.hashing import EntityId
from shared.log import JsonLogger
from shared.schema.features import FeatureBatch
from shared.schema.speculative import HitLevel, PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
from shared.schema.stamp import Stamp
from shared.weights.deltas import parse_stamp
from shared.weights.held import Versions

STATION = "speculative"


class SpeculativeService:
    """One replica of the cache's front.

    Args:
        config: Configuration.
        versions: The stored embeddings by weights version.
        clock: Time.
        replica: Name of this replica.
        logger: Where failed calls are logged.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        versions: Versions[EmbeddingStore],
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
    ) -> None:
        self.meter = Meter(STATION, replica, clock, logger)
        self._config = config
        self._versions = versions
        self._clock = clock
        self._replica = replica

    async def lookup(self, task: SpeculativeTask, features: FeatureBatch) -> SpeculativeEmbeddings:
        """Return the best stored embedding of each candidate, in one round trip to the store.

        A store that is out of reach or slow is no error: every candidate has level none, and it is counted.

        Raises:
            VersionMismatchError: another weights version, or features of another request.
            DeadlineExceededError: the request expired while it waited.
        """
        with self.meter.call("lookup", features.stamp.request_id) as timer:
            deadline = Deadline.after_ms(task.remaining_ms, self._clock)
            deadline.check(STATION)
            store = await self._versions.get(task.version, STATION)
            check_stamps([features.stamp], task.request_id, task.version, STATION)
            try:
                vectors, levels = await self._lookup(store, task, features, deadline)
            except (StoreUnavailableError, DeadlineExceededError) as error:
                self.meter.note(f"lookup_{error.code}")
                vectors = np.zeros((features.num_candidates, store.width), np.float32)
                levels = np.full(features.num_candidates, HitLevel.NONE, np.int8)
            for level in HitLevel:
                self.meter.add("candidates_total", int((levels == level).sum()), level=level.label)
            self.meter.computed("lookup", compute_ms := timer.elapsed_ms())
            stamp = Stamp(task.request_id, task.version, STATION, self._replica, compute_ms)
            return SpeculativeEmbeddings(stamp, vectors, levels)

    async def fill(self, task: SpeculativeTask, batch: PrecomputedBatch) -> int:
        """Store what a foundation worker computed for a user; the same batch twice changes nothing.

        Returns:
            Embeddings stored.

        Raises:
            VersionMismatchError: another weights version, or a batch of another request.
            InvalidRequestError: the vectors are not of the store's width.
            StoreUnavailableError: the store cannot be reached or is too slow.
        """
        with self.meter.call("fill", task.request_id):
            store = await self._versions.get(task.version, STATION)
            check_stamps([batch.stamp], task.request_id, task.version, STATION)
            if batch.vectors.ndim != 2 or batch.vectors.shape[1] != store.width:
                shape, width = list(batch.vectors.shape), store.width
                raise InvalidRequestError(
                    f"vectors must be [K, {width}], are {shape}", field="vectors", limit=width, value=str(shape)
                )
            deadline = Deadline.after_ms(self._config.fill_timeout_ms, self._clock)
            try:
                num_stored = await deadline.run(store.write(task.user, batch), STATION)
            except DeadlineExceededError as error:
                raise StoreUnavailableError(error.message, stage=STATION) from error
            self.meter.add("stored_total", num_stored)
            return num_stored

    async def forget(self, user: EntityId) -> bool:
        """Forget a user's embeddings: those of the held versions are deleted, none of any version is read again.

        Returns:
            Whether there were any of a held version.

        Raises:
            StoreUnavailableError: the store cannot be reached or is too slow.
        """
        with self.meter.call("forget"):
            found = False
            held = {parse_stamp(stamp)[0]: stamp for stamp in self._versions.report().held}
            for stamp in held.values():  # a version's states share one hash
                store = await self._versions.get(stamp, STATION)
                deadline = Deadline.after_ms(self._config.fill_timeout_ms, self._clock)
                try:
                    found |= await deadline.run(store.forget(user), STATION)
                except DeadlineExceededError as error:
                    raise StoreUnavailableError(error.message, stage=STATION) from error
            return found

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        return self.meter.metrics.render()

    def status(self) -> dict[str, Any]:
        """Return version and counters of this replica."""
        return {
            "station": STATION,
            "replica": self._replica,
            **self._versions.report().body(),
            "counters": self.meter.counters(),
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check; a store that is out of reach lowers hit levels, it does not end replicas."""

    async def _lookup(
        self, store: EmbeddingStore, task: SpeculativeTask, features: FeatureBatch, deadline: Deadline
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.int8]]]:
        limit_ms = min(self._config.store_timeout_ms, deadline.to_wire_ms())
        reading = store.read(task.user, task.as_of_s)
        records = await Deadline.after_ms(limit_ms, self._clock).run(reading, STATION)
        return resolve(
            features.candidate_keys,
            features.group_keys,
            np.ascontiguousarray(records["key"]),
            np.ascontiguousarray(records["group"]),
            records["vector"].astype(np.float32),
        )
