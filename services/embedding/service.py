"""Embedding: one shard of the tables, answering with the distinct rows that a request needs of it."""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from models.features import FeatureExtractor
from models.golden import Golden
from models.source import WeightSource
from models.stations import TableShard
from services.embedding.config import EmbeddingConfig
from services.meter import Meter
from shared.clock import Clock
from shared.deadline import Deadline
from shared.log import JsonLogger
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from shared.weights.held import OneVersion, Versions


class ShardRows(Protocol):
    """One shard's rows of one weights version: a ``TableShard``, or one state of a ``LiveTableShard``."""

    @property
    def num_bytes(self) -> dict[str, int]:
        """Table -> bytes of this shard's rows."""
        ...

    def lookup(self, features: FeatureBatch) -> dict[str, npt.NDArray[np.float32]]:
        """Return the rows of a request: table -> float32 [U_s, D_s]."""
        ...


class EmbeddingService:
    """One replica of one shard.

    Args:
        config: Configuration.
        versions: This shard's part of the tables by weights version.
        clock: Time.
        replica: Name of this replica.
        logger: Where failed calls are logged.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        versions: Versions[ShardRows],
        clock: Clock,
        replica: str,
        logger: JsonLogger | None = None,
    ) -> None:
        self.station = f"embedding:{config.shard}"
        self.meter = Meter(self.station, replica, clock, logger)
        self._shard = config.shard
        self._versions = versions
        self._clock = clock
        self._replica = replica

    @classmethod
    def from_weights(
        cls, config: EmbeddingConfig, source: WeightSource, clock: Clock, replica: str, logger: JsonLogger | None = None
    ) -> Self:
        """Build a replica from a weights version.

        Raises:
            WeightsError: the weights do not answer their golden request.
        """
        tables = TableShard(source, config.shard, config.num_shards, config.backend, config.map_dir)
        Golden.from_weights(source).check_shard(tables, FeatureExtractor.from_weights(source))
        return cls(config, OneVersion[ShardRows](source.version, tables), clock, replica, logger)

    async def lookup(self, features: FeatureBatch, remaining_ms: float) -> EmbeddingRows:
        """Return the rows of a request that this shard owns.

        Runs on the event loop: 1,000 candidates take about 0.1 ms, less than a hop to a thread and back.

        Args:
            features: The candidates.
            remaining_ms: Budget left when the call was made.

        Raises:
            VersionMismatchError: the features were made with another weights version.
            DeadlineExceededError: the request expired while it waited.
            InvalidRequestError: a row is outside its table.
        """
        with self.meter.call("lookup", features.stamp.request_id) as timer:
            Deadline.after_ms(remaining_ms, self._clock).check(self.station)
            version = features.stamp.version
            tables = await self._versions.get(version, self.station)
            rows = tables.lookup(features)
            self.meter.add("rows_total", sum(len(part) for part in rows.values()))
            self.meter.add("distinct_rows_total", sum(map(len, features.unique_rows.values())))
            self.meter.add("ids_total", sum(len(ids.values) for ids in features.features.values()))
            self.meter.add("oov_ids_total", sum(features.num_oov.values()))
            self.meter.computed("lookup", compute_ms := timer.elapsed_ms())
            stamp = Stamp(features.stamp.request_id, version, self.station, self._replica, compute_ms)
            return EmbeddingRows(stamp, self._shard, rows)

    def metrics(self) -> bytes:
        """Return the metrics of this replica in Prometheus' text format."""
        return self.meter.metrics.render()

    def status(self) -> dict[str, Any]:
        """Return version, counters and bytes of rows by table of this replica."""
        return {
            "station": self.station,
            "replica": self._replica,
            **self._versions.report().body(),
            "counters": self.meter.counters(),
            "table_bytes": self._versions.newest().num_bytes,
        }

    async def check_health(self) -> None:
        """Answer the mesh's health check: a loop that runs and tables that loaded are all there is."""
