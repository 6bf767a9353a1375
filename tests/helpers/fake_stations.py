"""Stations without a model: right messages, right stamps, made-up numbers. For tests of what is around the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.config import RankerConfig
from services.ingress.config import IngressConfig
from services.ingress.directory import DeploymentStatus, ReplicaStatus, StoreStatus
from services.ingress.job import Stations
from services.ingress.model_info import ModelInfo
from services.ingress.service import IngressService
from services.preprocess.config import PreprocessConfig
from shared.clock import Clock, ManualClock
from shared.handle import LocalHandle
from shared.hashing import EntityId, canonical_id
from shared.log import JsonLogger
from shared.schema.api import Event
from shared.schema.embeddings import EmbeddingRows
from shared.schema.features import FeatureBatch, PreprocessTask
from shared.schema.ranking import RankedList, RankTask
from shared.schema.speculative import PrecomputedBatch, SpeculativeEmbeddings, SpeculativeTask
from shared.schema.stamp import Stamp
from shared.schema.user import EncodeTask, UserState
from shared.wire import decode_batch
from tests.helpers.faulty import FaultyService

VERSION = "v1"
WIDTH = 4


def stamp(request_id: str, station: str, version: str = VERSION) -> Stamp:
    return Stamp(request_id, version, station, f"{station}-0", 0.5)


class FakePreprocess:
    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    async def extract(self, task: PreprocessTask) -> FeatureBatch:
        self.blocks.append(task.block)
        keys = decode_batch(task.block, PreprocessConfig().batch_limits).keys
        dense = np.zeros((len(keys), 0), np.float32)
        return FeatureBatch(stamp(task.request_id, "preprocess"), keys, keys % 3, {}, {}, dense, {"item_id": 0})


class FakeSequence:
    def __init__(self) -> None:
        self.appended: list[Event] = []

    async def encode(self, task: EncodeTask) -> UserState:
        return UserState(stamp(task.request_id, "sequence"), {}, 7, task.as_of_s - 1, task.as_of_s)

    async def append(self, events: list[Event]) -> dict[str, int]:
        self.appended.extend(events)
        return {"appended": len(events), "duplicates": 0, "expired": 0, "buffered": 0}

    async def forget(self, user: EntityId) -> bool:
        kept = [event for event in self.appended if canonical_id(event.user_id) != user]
        found = len(kept) < len(self.appended)
        self.appended = kept
        return found


class FakeEmbedding:
    def __init__(self, shard: int) -> None:
        self._shard = shard

    async def lookup(self, features: FeatureBatch, remaining_ms: float) -> EmbeddingRows:
        return EmbeddingRows(stamp(features.stamp.request_id, f"embedding:{self._shard}"), self._shard, {})


class FakeSpeculative:
    """Knows what it was filled with, by user; everything else has level none."""

    def __init__(self) -> None:
        self.stored: dict[tuple[object, int], npt.NDArray[np.float32]] = {}

    async def lookup(self, task: SpeculativeTask, features: FeatureBatch) -> SpeculativeEmbeddings:
        keys = features.candidate_keys.tolist()
        found = [self.stored.get((task.user, key)) for key in keys]
        vectors = np.stack([np.zeros(WIDTH, np.float32) if vector is None else vector for vector in found])
        levels = np.array([0 if vector is None else 3 for vector in found], np.int8)
        return SpeculativeEmbeddings(stamp(task.request_id, "speculative"), vectors, levels)

    async def fill(self, task: SpeculativeTask, batch: PrecomputedBatch) -> int:
        for key, vector in zip(batch.candidate_keys.tolist(), batch.vectors, strict=True):
            self.stored[task.user, key] = vector
        return len(batch.candidate_keys)

    async def forget(self, user: EntityId) -> bool:
        found = [known for known in self.stored if known[0] == user]
        for known in found:
            del self.stored[known]
        return bool(found)


class FakeFoundation:
    async def precompute(
        self, task: SpeculativeTask, positions: npt.NDArray[np.int32], features: FeatureBatch, *inputs: object
    ) -> PrecomputedBatch:
        keys, groups = features.candidate_keys[positions], features.group_keys[positions]
        vectors = np.full((len(keys), WIDTH), 0.5, np.float32)
        return PrecomputedBatch(stamp(task.request_id, "foundation"), keys, groups, vectors, task.as_of_s)


class FakeRanking:
    """Values candidates by their key, biggest first; the full tier gives a full pass to the better half."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.tasks: list[RankTask] = []

    async def rank(
        self,
        task: RankTask,
        features: FeatureBatch,
        state: UserState | None,
        spec: SpeculativeEmbeddings | None,
        *rows: EmbeddingRows | None,
    ) -> RankedList:
        self.tasks.append(task)
        order = np.argsort(-features.candidate_keys, kind="stable").astype(np.int32)[: task.limit]
        count = len(order)
        values = (features.candidate_keys[order] / 1e6).astype(np.float32)
        num_full = (features.num_candidates + 1) // 2 if self._tier == "full" else 0
        return RankedList(
            stamp=stamp(task.request_id, f"ranking:{self._tier}", task.version),
            order=order,
            scores=np.stack([values, values / 2], axis=1),
            values=values,
            full_pass=np.arange(count) < num_full,
            levels=np.zeros(count, np.int8) if spec is None else spec.levels[order],
            missing_shards=tuple(shard for shard, part in enumerate(rows) if part is None),
            cold_start=state is None,
            history_degraded="" if state is None else state.degraded,
            history_length=0 if state is None else state.history_length,
            upstream=tuple(part.stamp for part in (features, state, spec, *rows) if part is not None),
            first_pass_ms=0.1,
            full_pass_ms=0.2,
            num_oov=features.num_oov,
        )


class FakeDirectory:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.down: set[str] = set()

    async def deployments(self) -> list[DeploymentStatus]:
        return [
            DeploymentStatus(
                name=name,
                target=1,
                replicas=[
                    ReplicaStatus(id=f"{name}-0", state="down" if name in self.down else "ready", version=VERSION)
                ],
            )
            for name in self.names
        ]

    async def store(self) -> StoreStatus:
        return StoreStatus(kind="embedded", url="redis://127.0.0.1:1", healthy=True)


class FakeMesh:
    """An ingress over fake stations, each of which can be told to fail.

    Args:
        config: The ingress's configuration.
        clock: Time; by default one that moves only when told to.
        logger: Where the ingress logs.
    """

    def __init__(
        self, config: IngressConfig | None = None, clock: Clock | None = None, logger: JsonLogger | None = None
    ) -> None:
        self.config = config or IngressConfig()
        self.clock = clock or ManualClock()
        names: dict[str, Any] = {"preprocess": FakePreprocess(), "sequence": FakeSequence()}
        names |= {f"embedding:{shard}": FakeEmbedding(shard) for shard in range(self.config.num_shards)}
        names |= {"speculative": FakeSpeculative(), "foundation": FakeFoundation()}
        names |= {f"ranking:{tier.name}": FakeRanking(tier.name) for tier in self.config.tiers}
        self.services = {name: FaultyService(service, self.clock) for name, service in names.items()}
        self.directory = FakeDirectory(["ingress", *names])
        handles = {name: LocalHandle(name, service) for name, service in self.services.items()}
        self.stations = Stations(
            preprocess=handles["preprocess"],
            sequence=handles["sequence"],
            embedding=tuple(handles[f"embedding:{shard}"] for shard in range(self.config.num_shards)),
            speculative=handles["speculative"],
            ranking={tier.name: handles[f"ranking:{tier.name}"] for tier in self.config.tiers},
            foundation=handles["foundation"],
        )
        model = ModelInfo(VERSION, RankerConfig(), {"click_auc": 0.79}, None)
        self.ingress = IngressService(
            self.config, self.stations, model, self.directory, self.clock, "ingress-0", logger=logger
        )

    @property
    def manual(self) -> ManualClock:
        """The clock, for tests that move it."""
        assert isinstance(self.clock, ManualClock)
        return self.clock

    def in_flight(self) -> int:
        """Calls that run in any station."""
        return sum(service.in_flight for service in self.services.values())
