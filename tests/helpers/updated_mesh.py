"""A whole mesh in one process whose weights change: real services, real deltas, the real roll-out loop, no Ray."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.desk import FolderDesk
from cluster.rollout import Rollouts, UpdatesConfig
from models.config import RankerConfig
from models.execution_config import REFERENCE
from models.source import MemorySource
from models.updates.live import LiveConfig
from models.updates.stations import encoder_series, ranker_series, shard_series
from services.ingress.config import IngressConfig
from services.ingress.model_info import ModelInfo
from services.ingress.routing import BudgetRouter
from services.ingress.serving import FrontModel, ServingOrder
from services.preprocess.series import extractor_series
from services.speculative.config import SpeculativeConfig
from services.speculative.series import NamedStates
from services.speculative.store import EmbeddingStore
from shared.log import JsonLogger
from shared.weights import WeightStore
from shared.weights.delta_log import DeltaLog
from shared.weights.held import HeldVersions, Series, Versions
from tests.helpers.local_mesh import LocalMesh

LIVE = LiveConfig(block_rows=4)


def publish_source(store: WeightStore, source: MemorySource) -> None:
    """Write a source into a store as a version of its name."""
    with store.writer(source.version) as writer:
        for group, tensors in source.groups.items():
            writer.add_tensors(group, tensors)
        for name, document in source.documents.items():
            writer.add_json(name, document)
        writer.commit()


class UpdatedMesh(LocalMesh):
    """A mesh over a store; ``rollouts.round()`` is one step of what its owner does.

    Args:
        folder: Gets the store and the requests for roll-outs.
        source: First version.
        config: The ingress's configuration.
    """

    def __init__(self, folder: Path, source: MemorySource, config: IngressConfig | None = None) -> None:
        self.folder = folder
        self.store = WeightStore(folder / "weights")
        publish_source(self.store, source)
        self._pool = ThreadPoolExecutor(2)
        self.held: dict[str, HeldVersions[Any]] = {}
        super().__init__(source, config=config)
        self.rollouts = Rollouts(
            FolderDesk(self.store, folder),
            source.version,
            Control(self),
            UpdatesConfig(live=LIVE, busy_share=1.0),
            self.clock,
            JsonLogger(stream=io.StringIO()),
        )

    async def aclose(self) -> None:
        """Stop background work and threads."""
        await super().aclose()
        self._pool.shutdown()

    def _held(self, station: str, version: str, part: Any) -> Versions[Any]:
        held = self.held[station] = HeldVersions(self._opener(station), self._pool)
        held.start([version])
        return held

    def _opener(self, station: str) -> Callable[[str], Series[Any]]:
        kind, _, which = station.partition(":")
        num_shards = self.config.num_shards

        def opened(base: str) -> Series[Any]:
            reader, log = self.store.open(base), DeltaLog(self.store, base)
            if kind == "preprocess":
                return extractor_series(reader, log, LIVE)
            if kind == "embedding":
                return shard_series(reader, log, int(which), num_shards, "reference", LIVE)
            if kind == "sequence":
                return encoder_series(reader, log, REFERENCE, LIVE)
            if kind == "speculative":
                width = RankerConfig.model_validate(reader.json("model")).speculative_width
                config = SpeculativeConfig(width=width, store_timeout_ms=30_000)
                return NamedStates(base, lambda stamp: EmbeddingStore(self.redis, config, stamp, self.clock))
            return ranker_series(reader, log, REFERENCE, None, LIVE)

        return opened

    def _open_model(self, version: str) -> FrontModel:
        router = BudgetRouter(self.config.tiers, self.config.light_above_in_flight)
        return FrontModel(ModelInfo.from_weights(self.store.open(version)), router)


class Control:
    """``cluster.rollout.MeshControl`` over the services of one process.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: UpdatedMesh) -> None:
        self._mesh = mesh
        self.published: ServingOrder | None = None

    def stations(self) -> Sequence[str]:
        """Return all stations."""
        return ["ingress", *self._mesh.held]

    async def hold(self, station: str, stamps: Sequence[str], wait_s: float) -> Sequence[Mapping[str, Any]]:
        """Tell a station which states to hold."""
        if station == "ingress":
            return [await self._mesh.ingress.serving.hold(stamps)]
        return [(await self._mesh.held[station].hold(stamps, wait_s)).body()]

    async def serve(self, order: ServingOrder) -> Sequence[Mapping[str, Any]]:
        """Tell the ingress what to rank with."""
        ingress = self._mesh.ingress
        return [{**await ingress.serving.take(order), "feedback": ingress.feedback.sums()}]

    def publish(self, order: ServingOrder) -> None:
        """Keep the order."""
        self.published = order
