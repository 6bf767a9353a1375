"""The shard's service: what it counts, what it refuses, and its configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from models.features import FeatureExtractor
from models.random_weights import TINY
from models.source import MemorySource
from services.embedding.config import EmbeddingConfig
from services.embedding.service import EmbeddingService
from shared.clock import ManualClock
from shared.errors import DeadlineExceededError, InvalidRequestError, VersionMismatchError
from shared.schema.features import FeatureBatch
from shared.schema.stamp import Stamp
from tests.helpers.weights import random_weights


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return random_weights()


def _features(source: MemorySource, version: str | None = None) -> FeatureBatch:
    stamp = Stamp("r", version or source.version, "test", "0", 0.0)
    return FeatureExtractor.from_weights(source).extract_ids([1, 2, 3, 40]).stamped(stamp)


def _service(source: MemorySource, shard: int = 0, **changes: object) -> EmbeddingService:
    config = EmbeddingConfig.model_validate({"shard": shard, "num_shards": 2, "backend": "reference", **changes})
    return EmbeddingService.from_weights(config, source, ManualClock(), "0")


def _asked(features: FeatureBatch) -> dict[str, int]:
    """What a whole request asks for: its ids, those that nobody knows, and its distinct rows."""
    ids = {name: len(jagged.values) for name, jagged in features.features.items()}
    distinct = sum(map(len, features.unique_rows.values()))
    assert sum(ids.values()) > distinct, "some ids share a row"
    return {"ids": sum(ids.values()), "oov_ids": sum(features.num_oov.values()), "distinct_rows": distinct}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_every_shard_counts_its_own_calls_and_rows(source: MemorySource) -> None:
    features = _features(source)
    total = 0
    for shard in range(2):
        service = _service(source, shard)
        rows = (await service.lookup(features, 100.0)).rows
        found = sum(map(len, rows.values()))
        total += found
        counters = service.status()["counters"]
        assert counters == {"in_flight": 0, "calls.lookup.ok": 1, "rows": found, **_asked(features)}
        assert service.status()["table_bytes"]["item"] == (21, 20)[shard] * TINY.width * 4
        assert f"rankmesh_embedding_rows_total {found:.1f}".encode() in service.metrics()
    assert total == sum(map(len, features.unique_rows.values()))


@pytest.mark.parametrize("backend", ["reference", "fbgemm"])
async def test_refusals_are_counted_by_code(source: MemorySource, backend: str) -> None:
    service = _service(source, backend=backend)
    features = _features(source)
    features.unique_rows["item"] = np.array([2, 10**6], np.int64)
    with pytest.raises(InvalidRequestError, match=r"rows of table item must be in \[0, 41\), are 1000000"):
        await service.lookup(features, 100.0)
    with pytest.raises(VersionMismatchError):
        await service.lookup(_features(source, "another"), 100.0)
    with pytest.raises(DeadlineExceededError):
        await service.lookup(_features(source), 0.0)
    counters = service.status()["counters"]
    assert {name for name in counters if name.startswith("calls")} == {
        "calls.lookup.invalid_request",
        "calls.lookup.version_mismatch",
        "calls.lookup.deadline_exceeded",
    }


async def test_rows_in_files_are_served_alike(source: MemorySource, tmp_path: Path) -> None:
    features = _features(source)
    held = (await _service(source).lookup(features, 100.0)).rows
    mapped = (await _service(source, map_dir=tmp_path).lookup(features, 100.0)).rows
    assert held.keys() == mapped.keys()
    for name, rows in held.items():
        np.testing.assert_array_equal(mapped[name], rows)
    assert _names(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shard": 2, "num_shards": 2}, "shard must be below num_shards 2, is 2"),
        ({"map_dir": "/tmp/rows"}, "map_dir needs backend reference, is fbgemm"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EmbeddingConfig.model_validate(fields)
